"""The recorded steps of all ranks: intervals, sums of them, a table and a trace. All times are in ms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

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
class Span(Interval):
    """A stretch of the training thread (on CUDA: of its stream); docs/timeline.md has a table of them."""

    name: PhaseName


@dataclass(frozen=True)
class Activity(Interval):
    """Something done for a bucket: a collective, from its launch to its completion, or code of a stage."""

    kind: Kind
    """Its purpose; code of a reducer, such as a cast, is ``reduce``."""
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
    phases: tuple[Span, ...]
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
    def overlap_fraction(self) -> float | None:
        """The share of communication that was hidden behind other work; ``None`` where there was none."""
        return 1 - self.exposed_ms / self.communication_ms if self.communication else None

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent for its buckets."""
        return sum(bucket.sent_bytes for bucket in self.buckets)

    def in_phase(self, name: PhaseName) -> list[Span]:
        """The stretches of one phase."""
        return [phase for phase in self.phases if phase.name == name]

    def phase_ms(self, name: PhaseName) -> float:
        """How long it was in a phase."""
        return length_ms(self.in_phase(name))


@dataclass(frozen=True, kw_only=True)
class Report:
    """The recorded steps of all ranks; ``print`` it for a table."""

    title: str
    """The ``repr`` of the stage registered with the model, or ``"plain DDP"``."""
    ranks: tuple[tuple[StepReport, ...], ...]
    """By rank, in the order of the steps."""

    @property
    def steps(self) -> tuple[StepReport, ...]:
        """The steps of all ranks."""
        return tuple(step for steps in self.ranks for step in steps)

    def __str__(self) -> str:
        """Every step in a line, and the buckets of the step that took rank 0 the median time.

        The first two steps, in which DDP makes its buckets, are left out of the median if there are more.
        """
        ranks = len(self.ranks)
        heading = f"{self.title} on {ranks} {'rank' if ranks == 1 else 'ranks'}, times in ms"
        steps = sorted(self.ranks[0][2:] or self.ranks[0], key=lambda step: step.step_ms)
        if not steps:
            return f"{heading}\nno step was recorded"
        step = steps[(len(steps) - 1) // 2]
        lines = [heading, *_table(_STEP_COLUMNS, self.steps)]
        lines += ["", f"buckets of step {step.step} on rank {step.rank}, from the step's start"]
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


# The trace -----------------------------------------------------------------------------------------------------------


def trace_events(report: Report) -> Iterator[dict[str, Any]]:
    """The events of a Chrome trace: a process for each rank, whose steps follow each other.

    The main row shows the phases without their waits, and in these the exposed communication. Activities of buckets are
    asynchronous events, since several of one row may overlap.
    """
    for rank, steps in enumerate(report.ranks):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}: {report.title}"}}
        start_ms = 0.0
        for step in steps:
            phases = [phase for phase in step.phases if phase.name not in ("buffers", "wait")]
            row: list[tuple[str, Interval]] = [
                (phase.name, part) for phase in phases for part in without([phase], step.waits)
            ]
            row += [("exposed communication", part) for part in intersection(step.waits, step.communication)]
            for name, one in row:
                times = {"ts": 1e3 * (start_ms + one.start_ms), "dur": 1e3 * one.duration_ms}
                yield {"ph": "X", "name": name, "pid": rank, "tid": 0, **times}
            for bucket in step.buckets:
                for number, activity in enumerate(bucket.activities):
                    shown = {"name": f"{activity.label} [bucket {bucket.index}]", "cat": activity.kind, "pid": rank}
                    shown |= {"tid": 0, "id": f"{step.rank}.{step.step}.{bucket.index}.{number}"}
                    yield {"ph": "b", **shown, "ts": 1e3 * (start_ms + activity.start_ms)}
                    yield {"ph": "e", **shown, "ts": 1e3 * (start_ms + activity.end_ms)}
            start_ms += step.step_ms
