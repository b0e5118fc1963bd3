"""The recorded steps of all ranks: intervals, what follows from them, a table and a picture. All times are in ms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from overlap._checks import require_extra
from overlap.errors import ConfigurationError

PhaseName = Literal["buffers", "forward", "loss", "backward", "finalization", "optimizer", "wait"]
Kind = Literal["reduce", "transform", "update", "gather", "average"]


@dataclass(frozen=True)
class Interval:
    """From ``start_ms`` to ``end_ms``, counted from the start of its step."""

    start_ms: float
    end_ms: float

    @property
    def duration_ms(self) -> float:
        """Its length."""
        return self.end_ms - self.start_ms


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals in order that do not touch."""
    merged: list[Interval] = []
    for one in sorted(intervals, key=lambda one: one.start_ms):
        if merged and one.start_ms <= merged[-1].end_ms:
            merged[-1] = Interval(merged[-1].start_ms, max(merged[-1].end_ms, one.end_ms))
        else:
            merged.append(Interval(one.start_ms, one.end_ms))
    return merged


def intersection(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """The moments that are in both."""
    others = union(right)
    both = (
        Interval(max(one.start_ms, other.start_ms), min(one.end_ms, other.end_ms))
        for one in union(left)
        for other in others
    )
    return [one for one in both if one.start_ms < one.end_ms]


def without(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """The moments of ``left`` that are not in ``right``."""
    holes = union(right)
    starts = [float("-inf"), *(hole.end_ms for hole in holes)]
    ends = [*(hole.start_ms for hole in holes), float("inf")]
    return intersection(left, map(Interval, starts, ends))


def length_ms(intervals: Iterable[Interval]) -> float:
    """How long they are together, overlaps counted once."""
    return sum(one.duration_ms for one in union(intervals))


def hull(intervals: Sequence[Interval]) -> Interval | None:
    """From the first start to the last end."""
    if not intervals:
        return None
    return Interval(min(one.start_ms for one in intervals), max(one.end_ms for one in intervals))


@dataclass(frozen=True)
class Phase(Interval):
    """What the training thread (on CUDA: its stream) was in; docs/timeline.md has a table of them."""

    name: PhaseName


@dataclass(frozen=True)
class Activity(Interval):
    """Something done for a bucket: a collective, from its launch to its completion, or code of a stage."""

    kind: Kind
    """What it is for; code of a reducer, such as a cast, is ``reduce``."""
    label: str
    """The collective's name, or the stage's ``repr``."""
    is_collective: bool
    sent_bytes: int = 0
    """Bytes that this rank sends for it; 0 if unknown (a communication hook's)."""


@dataclass(frozen=True, kw_only=True)
class BucketReport:
    """One bucket in one step."""

    index: int
    gradient_bytes: int
    ready_ms: float
    """When its last gradient was ready."""
    activities: tuple[Activity, ...]

    @property
    def reduce(self) -> Interval | None:
        """From the launch of the first collective that makes the mean to the completion of the last."""
        return hull(self.collectives("reduce"))

    @property
    def update(self) -> Interval | None:
        """The longest stretch of the update's code."""
        code = [one for one in self.activities if one.kind == "update" and not one.is_collective]
        longest = max(code, key=lambda one: one.duration_ms, default=None)
        return longest and Interval(longest.start_ms, longest.end_ms)

    @property
    def gather(self) -> Interval | None:
        """From the launch of the first collective that sends updated parameters to the completion of the last."""
        return hull(self.collectives("gather"))

    @property
    def done_ms(self) -> float:
        """When everything that was recorded for it was over."""
        return max((one.end_ms for one in self.activities), default=self.ready_ms)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent for it."""
        return sum(one.sent_bytes for one in self.activities)

    def collectives(self, kind: Kind | None = None) -> list[Activity]:
        """Its collectives, of one kind or all."""
        return [one for one in self.activities if one.is_collective and kind in (None, one.kind)]


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step of one rank: from the start of a forward to the start of the next. Intervals count from its start."""

    rank: int
    step: int
    """0 for the first that was recorded."""
    step_ms: float
    phases: tuple[Phase, ...]
    buckets: tuple[BucketReport, ...]

    @cached_property
    def waits(self) -> list[Interval]:
        """When nothing was computed on the training thread because a bucket, or DDP's buffers, were being sent."""
        done_ms = max((bucket.done_ms for bucket in self.buckets), default=0.0)
        at_the_end = intersection(self.in_phase("finalization"), [Interval(0.0, done_ms)])
        return union([*at_the_end, *self.in_phase("wait"), *self.in_phase("buffers")])

    @cached_property
    def communication(self) -> list[Interval]:
        """When a collective of a stage or DDP's broadcast of buffers was in progress."""
        collectives = [one for bucket in self.buckets for one in bucket.collectives()]
        return union([*collectives, *self.in_phase("buffers"), *self.in_phase("wait")])

    @property
    def communication_ms(self) -> float:
        """How long some communication was in progress."""
        return length_ms(self.communication)

    @property
    def exposed_ms(self) -> float:
        """Exposed communication: how long nothing was computed because communication was in progress."""
        return length_ms(intersection(self.waits, self.communication))

    @property
    def exposed_code_ms(self) -> float:
        """How long the end of backward waited for code of stages (the last bucket's update) alone."""
        return length_ms(without(self.waits, self.communication))

    @property
    def overlap_fraction(self) -> float | None:
        """The share of communication that was hidden behind other work; ``None`` where there was none."""
        return 1 - self.exposed_ms / self.communication_ms if self.communication else None

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent for its buckets."""
        return sum(bucket.sent_bytes for bucket in self.buckets)

    def in_phase(self, name: PhaseName) -> list[Phase]:
        """The stretches of one phase."""
        return [phase for phase in self.phases if phase.name == name]

    def phase_ms(self, name: PhaseName) -> float:
        """How long it was in a phase."""
        return length_ms(self.in_phase(name))


@dataclass(frozen=True, kw_only=True)
class Report:
    """The recorded steps of all ranks; ``print`` it for a table."""

    title: str
    """The ``repr`` of what was registered with the model, or ``"plain DDP"``."""
    ranks: tuple[tuple[StepReport, ...], ...]
    """By rank, in the order of the steps."""

    @property
    def steps(self) -> tuple[StepReport, ...]:
        """The steps of all ranks."""
        return tuple(step for steps in self.ranks for step in steps)

    def median_step(self) -> int | None:
        """The number of the step that took rank 0 the median time; ``None`` if nothing was recorded.

        The first two steps, in which DDP makes its buckets, are left out if there are more.
        """
        steps = sorted(self.ranks[0][2:] or self.ranks[0], key=lambda step: step.step_ms)
        return steps[(len(steps) - 1) // 2].step if steps else None

    def of_step(self, number: int) -> tuple[StepReport, ...]:
        """One step on every rank that recorded it."""
        return tuple(step for step in self.steps if step.step == number)

    def __str__(self) -> str:
        """Every step in a line, and the buckets of rank 0's median step."""
        ranks = len(self.ranks)
        heading = f"{self.title} on {ranks} {'rank' if ranks == 1 else 'ranks'}, times in ms"
        number = self.median_step()
        if number is None:
            return f"{heading}\nno step was recorded"
        lines = [heading, *_table(_STEP_COLUMNS, self.steps)]
        for step in self.of_step(number)[:1]:
            lines += ["", f"buckets of step {number} on rank {step.rank}, from the step's start"]
            lines += _table(_BUCKET_COLUMNS, step.buckets)
        return "\n".join(lines)


def _span(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.start_ms:.1f} to {interval.end_ms:.1f}"


_Columns = dict[str, Callable[[Any], str]]
_STEP_COLUMNS: _Columns = {
    "rank": lambda step: str(step.rank),
    "step": lambda step: str(step.step),
    "step ms": lambda step: f"{step.step_ms:.1f}",
    "forward": lambda step: f"{step.phase_ms('forward'):.1f}",
    "backward": lambda step: f"{step.phase_ms('backward'):.1f}",
    "finalization": lambda step: f"{step.phase_ms('finalization'):.1f}",
    "optimizer": lambda step: f"{step.phase_ms('optimizer'):.1f}",
    "communication": lambda step: f"{step.communication_ms:.1f}",
    "exposed": lambda step: f"{step.exposed_ms:.1f}",
    "overlapped": lambda step: "-" if step.overlap_fraction is None else f"{step.overlap_fraction:.0%}",
    "sent MB": lambda step: f"{step.sent_bytes / 1e6:.2f}",
}
_BUCKET_COLUMNS: _Columns = {
    "bucket": lambda bucket: str(bucket.index),
    "MB": lambda bucket: f"{bucket.gradient_bytes / 1e6:.2f}",
    "ready ms": lambda bucket: f"{bucket.ready_ms:.1f}",
    "reduce": lambda bucket: _span(bucket.reduce),
    "update": lambda bucket: _span(bucket.update),
    "gather": lambda bucket: _span(bucket.gather),
    "sent MB": lambda bucket: f"{bucket.sent_bytes / 1e6:.2f}",
}


def _table(columns: _Columns, entries: Sequence[Any]) -> list[str]:
    rows = [list(columns), *([cell(entry) for cell in columns.values()] for entry in entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


# The picture ---------------------------------------------------------------------------------------------------------

_COLORS = {
    "forward": "#a6cee3",
    "loss": "#d9e8f2",
    "backward": "#4a90c2",
    "finalization": "#b9c4ce",
    "optimizer": "#59a75a",
    "buffers": "#f2cf3c",
    "transform": "#d98cb3",
    "reduce": "#f28e3c",
    "update": "#59a75a",
    "gather": "#9a6fb8",
    "average": "#2fb3b3",
    "exposed communication": "#d62728",
}
_LANES = ("compute", "communication", "stages")
_MOST_RANKS = 8

_Bar = tuple[str, Interval, int | None]
"""Its meaning, when, and the index of the bucket."""


def check_picture(path: str | Path) -> None:
    """Raises: ConfigurationError: matplotlib is missing, or does not write such a file."""
    require_extra("timeline", "matplotlib")
    if (suffix := Path(path).suffix) not in (".png", ".svg", ".pdf"):
        raise ConfigurationError(f"a timeline is drawn as .png, .svg or .pdf, got {suffix!r}: use 'timeline.png'")


def save_reports(reports: Mapping[str, Report], path: str | Path) -> None:
    """Draw rank 0's median step of each report into one file: a lane for computation, communication and stages each.

    Args:
        reports: by title, in the order in which they are shown.
        path: ends in ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        ConfigurationError: a report has no step, ``path`` ends in something else, or matplotlib is missing.
    """
    check_picture(path)
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels: dict[str, tuple[StepReport, ...]] = {}
    for title, report in reports.items():
        if (number := report.median_step()) is None:
            raise ConfigurationError(f"no step was recorded of {title!r}: train some steps inside `with Timeline(ddp)`")
        panels[f"{title} (step {number})"] = report.of_step(number)[:_MOST_RANKS]
    heights = [len(_LANES) * len(steps) for steps in panels.values()]
    figure = Figure(figsize=(11.0, 1.5 + 0.5 * sum(heights)), dpi=130, layout="constrained")
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    shown: set[str] = set()
    for axes, (title, steps) in zip(rows, panels.items(), strict=True):
        axes.set_title(title, fontsize=10, loc="left")
        shown |= _draw(axes, steps)
    rows[-1].set_xlabel("ms from the start of each rank's step; numbers: buckets; triangles: gradients are ready")
    handles = [Patch(color=color, label=meaning) for meaning, color in _COLORS.items() if meaning in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=9, frameon=False)
    figure.savefig(path)


def _draw(axes: Any, steps: Sequence[StepReport]) -> set[str]:
    """One step on each of its ranks; returns the meanings of its bars."""
    meanings = set()
    for rank, step in enumerate(steps):
        top = len(_LANES) * rank
        for lane, bars in enumerate(_lanes(step)):
            for meaning, one, index in bars:
                meanings.add(meaning)
                # Buckets in flight at the same time, one above the other.
                height = 0.8 if index is None else 0.4
                place = top + lane - 0.4 + (height * (index % 2) if index is not None else 0.0)
                axes.broken_barh([(one.start_ms, one.duration_ms)], (place, height), facecolors=_COLORS[meaning])
                if index is not None and one.duration_ms > 0.01 * step.step_ms:
                    axes.text(one.start_ms, place + height / 2, f" {index}", va="center", fontsize=7)
        ready_ms = [bucket.ready_ms for bucket in step.buckets]
        axes.plot(ready_ms, [top - 0.5] * len(ready_ms), ls="", marker="v", ms=4, color="black")
        axes.axvline(step.step_ms, color="black", lw=1, ls="--")
    labels = [f"rank {step.rank}  {lane}" for step in steps for lane in _LANES]
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_ylim(len(labels) - 0.5, -0.7)
    return meanings


def _lanes(step: StepReport) -> Iterator[list[_Bar]]:
    """The bars of each lane."""
    phases = [phase for phase in step.phases if phase.name not in ("buffers", "wait")]
    computed = [(phase.name, part, None) for phase in phases for part in without([phase], step.waits)]
    exposed = intersection(step.waits, step.communication)
    yield [*computed, *(("exposed communication", part, None) for part in exposed)]
    of_buckets = [(bucket.index, one) for bucket in step.buckets for one in bucket.activities]
    buffers = [("buffers", phase, None) for phase in step.in_phase("buffers")]
    yield [*buffers, *((one.kind, one, index) for index, one in of_buckets if one.is_collective)]
    yield [(one.kind, one, index) for index, one in of_buckets if not one.is_collective]
