"""Draws docs/images/wavefront.png: what the arrival of each bucket advances, as the code's own scheduler decides it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from overlap.hooks.engine.wavefront import Wavefront

BUCKETS = 4
COLLECTIVES = ("reduce", "gather")
COLORS = ("#7aa6d8", "#8fc79a")


@dataclass
class Bucket:
    """Stands for the coroutine of a bucket: each advance ends one collective and launches the next."""

    index: int
    moments: list[tuple[int, int]]
    """What is launched, bucket and collective, in order."""
    launched: int = 0
    ended_at: list[int] = field(default_factory=list)
    awaits_whole_pass: bool = False
    is_done: bool = False

    def advance(self) -> None:
        if self.launched:
            self.ended_at.append(len(self.moments))
        if self.launched == len(COLLECTIVES):
            self.is_done = True
            return
        self.moments.append((self.index, self.launched))
        self.launched += 1


def play() -> tuple[list[Bucket], list[tuple[int, int]], list[int]]:
    """The buckets, what was launched in order, and how much had been when each bucket arrived."""
    moments: list[tuple[int, int]] = []
    arrivals: list[int] = []
    buckets = [Bucket(index, moments) for index in range(BUCKETS)]
    wavefront = Wavefront()
    for bucket in buckets:
        arrivals.append(len(moments))
        wavefront.arrive(cast(Any, bucket), is_last=bucket.index == BUCKETS - 1)
    return buckets, moments, arrivals


def draw(path: Path) -> None:
    """The order of launches as a picture: a row for each bucket, a column for each launch."""
    buckets, moments, arrivals = play()
    figure, axes = plt.subplots(figsize=(9, 3.2))
    axes.set(xlim=(-1.3, len(moments) + 0.9), ylim=(BUCKETS + 0.1, -0.75))
    axes.axis("off")
    for index, at in enumerate(arrivals):
        axes.axvline(at - 0.04, ymin=0.04, ymax=0.86, color="#b0b6bd", lw=1, ls=":")
        axes.text(at, -0.35, f"{index} arrives", fontsize=8, color="#5a6068")
        axes.text(-0.15, index + 0.5, f"bucket {index}", ha="right", va="center", fontsize=10)
    for at, (index, number) in enumerate(moments):
        until = max(at + 1, buckets[index].ended_at[number])
        box = plt.Rectangle((at + 0.02, index + 0.14), until - at - 0.1, 0.72, color=COLORS[number], lw=0)
        axes.add_patch(box)
        axes.text(at + 0.12, index + 0.5, f"{at + 1}  {COLLECTIVES[number]}", va="center", fontsize=9)
    figure.savefig(path, dpi=130, bbox_inches="tight", facecolor="white")


if __name__ == "__main__":
    draw(Path(__file__).parent / "images" / "wavefront.png")
