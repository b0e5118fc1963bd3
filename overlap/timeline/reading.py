"""From marks to milliseconds, and from stages to what they are for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from typing import Any

from overlap.hooks import Chain, Role, Stage
from overlap.hooks.engine.background import BETWEEN_PASSES
from overlap.hooks.stage import walk
from overlap.timeline.clock import Clock
from overlap.timeline.recording import BucketRecord, StepRecord
from overlap.timeline.steps import Activity, BucketReport, Kind, Phase, StepReport

__all__ = ["read_start_ns", "read_steps", "roles_of", "synchronized"]

# What an update issues before it has updated anything; all else that it sends are new parameters.
_REDUCES = frozenset({"all_reduce", "reduce_scatter"})


def roles_of(root: Stage) -> dict[str, Role]:
    """What each stage is there for, by the label that it runs under."""
    roles = {repr(stage): stage.role for stage in walk(root)}
    if isinstance(root, Chain):
        roles[repr(root)] = root.stages[0].role  # Its own code only calls the first stage.
    return roles


def read_steps(
    records: Sequence[StepRecord], clock: Clock, roles: Mapping[str, Role], *, rank: int
) -> tuple[StepReport, ...]:
    """What was recorded, each step with times from its own start; ``start_ms`` is from that of the first."""
    clock.settle()
    # A recording that was broken off inside a step has no end of it.
    return tuple(
        _read_step(record, number, start_ms, clock, roles, rank)
        for number, (record, start_ms) in enumerate(zip(records, _starts_ms(records, clock), strict=True))
        if record.end is not None
    )


def _starts_ms(records: Sequence[StepRecord], clock: Clock) -> Iterable[float]:
    """When each step started: step by step, since a clock may measure a long time less finely."""
    between_ms = (clock.elapsed_ms(before.start, record.start) for before, record in pairwise(records))
    return islice(accumulate(between_ms, initial=0.0), len(records))


def read_start_ns(records: Sequence[StepRecord], clock: Clock) -> int | None:
    """When the first step started, in ns since the Unix epoch (a float of it is no finer than 0.2 us)."""
    return clock.calendar_ns(records[0].start) if records else None


def synchronized(
    ranks: Sequence[tuple[int | None, tuple[StepReport, ...]]],
) -> tuple[tuple[StepReport, ...], ...]:
    """The steps of each rank, which come with the start of its first, with ``start_ms`` from the first of any rank."""
    origin_ns = min((start_ns for start_ns, _ in ranks if start_ns is not None), default=0)
    return tuple(
        tuple(replace(step, start_ms=step.start_ms + ((start_ns or 0) - origin_ns) / 1e6) for step in steps)
        for start_ns, steps in ranks
    )


def _read_step(
    record: StepRecord, number: int, start_ms: float, clock: Clock, roles: Mapping[str, Role], rank: int
) -> StepReport:
    length_ms = clock.elapsed_ms(record.start, record.end)

    def read(mark: Any) -> float:
        return length_ms if mark is None else clock.elapsed_ms(record.start, mark)

    return StepReport(
        rank=rank,
        step=number,
        start_ms=start_ms,
        step_ms=length_ms,
        phases=tuple(Phase(read(start), read(end), name) for name, start, end in record.phases),  # type: ignore[arg-type]
        buckets=tuple(_read_bucket(bucket, read, roles) for bucket in record.buckets),
    )


def _read_bucket(record: BucketRecord, read: Any, roles: Mapping[str, Role]) -> BucketReport:
    code = [
        Activity(read(one.start), read(one.end), _purpose(one.stage, roles), one.stage, is_collective=False)
        for one in record.code
    ]
    operations = [
        Activity(
            read(one.start),
            read(one.end),
            _purpose(one.stage, roles, one.label),
            one.label,
            is_collective=True,
            sent_bytes=one.sent_bytes,
        )
        for one in record.operations
    ]
    activities = sorted((one for one in code + operations if one.end_ms >= one.start_ms), key=lambda one: one.start_ms)
    return BucketReport(
        index=record.index,
        gradient_bytes=record.gradient_bytes,
        ready_ms=read(record.ready),
        activities=tuple(activities),
    )


def _purpose(stage: str, roles: Mapping[str, Role], collective: str | None = None) -> Kind:
    if stage == BETWEEN_PASSES:
        return "gather"  # What else runs between passes belongs to no bucket.
    role = roles.get(stage)
    if role is Role.AVERAGER:
        return "average"
    if role is Role.TRANSFORM:
        return "transform"
    if role is not Role.UPDATE or collective in _REDUCES:
        return "reduce"
    return "update" if collective is None else "gather"
