"""A training step as a schedule, and how long it takes by the engine's own rules.

[Note: the cost model]

Bucket i is ready at r_i. Its collectives go over one link, one after the other: without stages between them it is
reduced at c_i = max(c_(i-1), r_i) + t_i. Where a chain is registered, the worker thread runs the stages in the order of
:class:`overlap.hooks.engine.wavefront.Wavefront`, which is asked for it with tasks that only take notes. Threads that
share cores, and computing beside sending, slow each other down by the rates of :class:`overlap.plan.clock.Rates`.

Left out: collectives in flight at the same time share the link in reality, and ranks are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from overlap.hooks.engine.wavefront import Wavefront
from overlap.plan.clock import COMPUTE, WORKER, Clock, Process, Rates, Run, Signal

__all__ = ["BucketWork", "Gather", "Hop", "Schedule", "step_ms", "worker_order"]

# The first step begins with an idle link, the second need not: the third is like all that follow.
_STEPS = 3


@dataclass(frozen=True)
class Hop:
    """What a stage computes up to its next collective, and how long that collective takes."""

    compute_ms: float
    link_ms: float


@dataclass(frozen=True, kw_only=True)
class BucketWork:
    """A bucket on its way: hops, then what is computed after the last one."""

    ready_ms: float
    """From the start of backward."""
    hops: tuple[Hop, ...]
    after_ms: float = 0.0


@dataclass(frozen=True)
class Gather:
    """A collective that is left to the next forward."""

    needed_ms: float
    """When the forward first reads what it brings."""
    link_ms: float


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A step. Times are of a machine that does nothing else."""

    begin_link_ms: float = 0.0
    """Of a collective that the forward begins with, such as DDP's broadcast of buffers."""
    forward_ms: float
    backward_ms: float
    buckets: tuple[BucketWork, ...]
    """In the order in which they become ready."""
    gathers: tuple[Gather, ...] = ()
    """In the order in which they are sent, once all buckets are through."""
    end_ms: float = 0.0
    """What the training thread computes after backward, such as the optimizer's step."""
    has_stages: bool = True
    """Whether stages run; else DDP sends each bucket as it comes."""
    is_inline: bool = False
    """Whether stages run on autograd's thread. See [Note: small models]."""
    rates: Rates = field(default_factory=Rates)


def step_ms(schedule: Schedule) -> float:
    """The time of a step among others like it."""
    clock = Clock(schedule.rates)
    ends_ms: list[float] = []
    arrivals = [[Signal() for _ in schedule.buckets] for _ in range(_STEPS)]
    through = [Signal() for _ in range(_STEPS)]
    clock.start(_training(clock, schedule, arrivals, through, ends_ms))
    if schedule.has_stages and not schedule.is_inline:
        clock.start(_worker(clock, schedule, arrivals, through))
    clock.run()
    assert len(ends_ms) == _STEPS, "a schedule that stands still"
    return ends_ms[-1] - ends_ms[-2]


def _training(
    clock: Clock, schedule: Schedule, arrivals: list[list[Signal]], through: list[Signal], ends_ms: list[float]
) -> Process:
    gathers: list[Signal] = []
    for step in range(_STEPS):
        if schedule.begin_link_ms:
            # On a connection of its own: it does not wait for gathers that the forward does not need yet.
            yield clock.send(schedule.begin_link_ms, is_ahead=True)
        yield from _forward(schedule, gathers)
        if not schedule.has_stages:
            yield from _plain_backward(clock, schedule)
        elif schedule.is_inline:
            yield from _inline_backward(clock, schedule)
        else:
            yield from _computed(schedule, lambda bucket, arrived=arrivals[step]: clock.set(arrived[bucket]))
            yield through[step]
        gathers = [clock.send(gather.link_ms) for gather in schedule.gathers]
        yield Run(COMPUTE, schedule.end_ms)
        ends_ms.append(clock.now_ms)


def _forward(schedule: Schedule, sent: Sequence[Signal]) -> Process:
    done_ms = 0.0
    pairs = zip(schedule.gathers, sent, strict=True) if sent else ()
    for gather, arrived in sorted(pairs, key=lambda pair: pair[0].needed_ms):
        yield Run(COMPUTE, gather.needed_ms - done_ms)
        done_ms = gather.needed_ms
        yield arrived
    yield Run(COMPUTE, schedule.forward_ms - done_ms)


def _computed(schedule: Schedule, arrived: Any) -> Process:
    """Backward, with ``arrived(bucket)`` called as each bucket becomes ready."""
    done_ms = 0.0
    for place, bucket in enumerate(schedule.buckets):
        yield Run(COMPUTE, bucket.ready_ms - done_ms)
        done_ms = bucket.ready_ms
        arrived(place)
    yield Run(COMPUTE, schedule.backward_ms - done_ms)


def _plain_backward(clock: Clock, schedule: Schedule) -> Process:
    sent: list[Signal] = []
    yield from _computed(
        schedule, lambda place: sent.extend(clock.send(hop.link_ms) for hop in schedule.buckets[place].hops)
    )
    yield from sent


def _inline_backward(clock: Clock, schedule: Schedule) -> Process:
    done_ms = 0.0
    flights: dict[int, Signal] = {}
    order = worker_order([len(bucket.hops) for bucket in schedule.buckets])
    for bucket, moves in zip(schedule.buckets, order, strict=True):
        yield Run(COMPUTE, bucket.ready_ms - done_ms)
        done_ms = max(done_ms, bucket.ready_ms)
        yield from _moved(clock, schedule, moves, flights, COMPUTE)
    yield Run(COMPUTE, schedule.backward_ms - done_ms)


def _worker(clock: Clock, schedule: Schedule, arrivals: list[list[Signal]], through: list[Signal]) -> Process:
    order = worker_order([len(bucket.hops) for bucket in schedule.buckets])
    for arrived, done in zip(arrivals, through, strict=True):
        flights: dict[int, Signal] = {}
        for signal, moves in zip(arrived, order, strict=True):
            yield signal
            yield from _moved(clock, schedule, moves, flights, WORKER)
        clock.set(done)


def _moved(
    clock: Clock, schedule: Schedule, moves: Sequence[tuple[int, int]], flights: dict[int, Signal], thread: str
) -> Process:
    for place, number in moves:
        bucket = schedule.buckets[place]
        if place in flights:
            yield flights.pop(place)
        if number == len(bucket.hops):
            yield Run(thread, bucket.after_ms)
        else:
            hop = bucket.hops[number]
            yield Run(thread, hop.compute_ms)
            flights[place] = clock.send(hop.link_ms)


def worker_order(hops: Sequence[int]) -> list[list[tuple[int, int]]]:
    """For the arrival of each bucket, which bucket is advanced to which of its collectives.

    Args:
        hops: how many collectives each bucket has; to advance to that number is to finish.
    """
    moves: list[list[tuple[int, int]]] = []
    wavefront = Wavefront()
    for place, count in enumerate(hops):
        moves.append([])
        task: Any = _Noted(place, count, moves)
        wavefront.arrive(task, is_last=place == len(hops) - 1)
    return moves


class _Noted:
    """Stands for a task of the engine, and notes when it is advanced."""

    awaits_whole_pass = False

    def __init__(self, place: int, hops: int, moves: list[list[tuple[int, int]]]) -> None:
        self.is_done = False
        self._place, self._hops, self._moves = place, hops, moves
        self._next = 0

    def advance(self) -> None:
        self._moves[-1].append((self._place, self._next))
        self.is_done = self._next == self._hops
        self._next += 1
