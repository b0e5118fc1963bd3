"""The intervals of every step and bucket, and what follows from them. All times are in ms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from overlap.timeline.spans import Interval, hull, intersection, length_ms, union, without

__all__ = ["Activity", "BucketReport", "Kind", "Phase", "PhaseName", "StepReport"]

PhaseName = Literal["buffers", "forward", "loss", "backward", "finalization", "optimizer", "wait"]
Kind = Literal["reduce", "transform", "update", "gather", "average"]


@dataclass(frozen=True)
class Phase(Interval):
    """What the training thread (on CUDA: its stream) was in.

    ``buffers``: DDP sends the module's buffers from rank 0, before the forward. ``forward``: the module's.
    ``loss``: from the model's output to the gradient of it. ``backward``: from there to the last gradient.
    ``finalization``: from there until DDP has waited for every bucket and set ``.grad``. ``optimizer``: an optimizer's
    ``step()``. ``wait``: it waited for a collective of a stage. The rest of a step is the loop's own.
    """

    name: PhaseName


@dataclass(frozen=True)
class Activity(Interval):
    """Something done for a bucket: a collective, from its launch to its completion, or code of a stage."""

    kind: Kind
    """What it is for; code of a reducer, such as a cast, is ``reduce``. Where a ``transform`` stands in its chain shows
    in when it runs: before ``reduce``, between ``reduce`` and ``update``, or after those."""
    label: str
    """The collective's name, or the stage's ``repr``."""
    is_collective: bool
    sent_bytes: int = 0
    """Bytes that this rank sends for it, 0 where that is not known (a communication hook's)."""


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
        return None if longest is None else Interval(longest.start_ms, longest.end_ms)

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
    start_ms: float
    """From the start of the first step of any rank."""
    step_ms: float
    phases: tuple[Phase, ...]
    buckets: tuple[BucketReport, ...]

    @property
    def forward(self) -> Interval | None:
        """The forward (of several, from the first to the last)."""
        return hull(self.in_phase("forward"))

    @property
    def backward(self) -> Interval | None:
        """From the gradient of the model's output to the last gradient; DDP's finalization comes after it."""
        return hull(self.in_phase("backward"))

    @cached_property
    def waits(self) -> list[Interval]:
        """When nothing was computed on the training thread because a bucket, or DDP's buffers, were being sent."""
        done_ms = max((bucket.done_ms for bucket in self.buckets), default=0.0)
        at_the_end = [
            Interval(one.start_ms, min(one.end_ms, done_ms))
            for one in self.in_phase("finalization")
            if one.start_ms < done_ms
        ]
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
        if not self.communication:
            return None
        return 1 - self.exposed_ms / self.communication_ms

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sent for its buckets."""
        return sum(bucket.sent_bytes for bucket in self.buckets)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients in all buckets."""
        return sum(bucket.gradient_bytes for bucket in self.buckets)

    def in_phase(self, name: PhaseName) -> list[Phase]:
        """The stretches of one phase."""
        return [phase for phase in self.phases if phase.name == name]

    def phase_ms(self, name: PhaseName) -> float:
        """How long it was in a phase."""
        return length_ms(self.in_phase(name))
