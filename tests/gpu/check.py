"""What a check is, and what comes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

__all__ = ["Check", "Outcome", "Result", "Topic"]

Topic = Literal["parity", "races", "sanitizer", "host waits", "memory", "times"]
Outcome = Literal["passed", "failed", "hung", "died", "skipped"]
Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A function that every rank runs, and where it can."""

    name: str
    topic: Topic
    run: Callable[[int, int, torch.device], Figures | None]
    """Called with rank, number of ranks and device, inside a default process group. Raises where something does not
    hold; may return figures, plain values for a report. It must pickle."""
    ranks: int = 2
    devices: tuple[str, ...] = ("cpu", "cuda")
    timeout_s: float = 60.0

    @property
    def world(self) -> tuple[int, bool]:
        """Checks of which this is equal may follow each other in the same processes. The sanitizer slows all down."""
        return self.ranks, self.topic == "sanitizer"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a check. ``detail`` says why it did not pass; ``figures`` are rank 0's."""

    name: str
    topic: Topic
    ranks: int
    outcome: Outcome
    detail: str = ""
    elapsed_s: float = 0.0
    figures: Figures = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
