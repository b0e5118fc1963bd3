"""The simulation against schedules worked out by hand, and what must hold of any."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlap.plan import clock as clock_module
from overlap.plan.clock import Rates
from overlap.plan.schedule import BucketWork, Gather, Hop, Schedule, step_ms, worker_order

MS = st.floats(0, 50, allow_nan=False).map(lambda ms: round(ms, 3))


def one_hop(ready_ms: float, link_ms: float, *, compute_ms: float = 0.0, after_ms: float = 0.0) -> BucketWork:
    return BucketWork(ready_ms=ready_ms, hops=(Hop(compute_ms, link_ms),), after_ms=after_ms)


@st.composite
def schedules(draw: st.DrawFn, *, has_stages: bool) -> Schedule:
    ready_ms = sorted(draw(st.lists(MS, min_size=1, max_size=6)))
    return Schedule(
        forward_ms=draw(MS),
        backward_ms=ready_ms[-1] + draw(MS),
        buckets=tuple(one_hop(ready, draw(MS)) for ready in ready_ms),
        end_ms=draw(MS),
        has_stages=has_stages,
    )


def closed_form_ms(schedule: Schedule) -> float:
    """c_i = max(c_(i-1), r_i) + t_i."""
    through_ms = 0.0
    for bucket in schedule.buckets:
        through_ms = max(through_ms, bucket.ready_ms) + sum(hop.link_ms for hop in bucket.hops)
    return schedule.forward_ms + max(schedule.backward_ms, through_ms) + schedule.end_ms


@settings(max_examples=100, deadline=None)
@given(schedule=schedules(has_stages=False))
def test_plain_ddp_is_the_closed_form(schedule: Schedule) -> None:
    assert step_ms(schedule) == pytest.approx(closed_form_ms(schedule), abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(schedule=schedules(has_stages=True))
def test_one_collective_a_bucket_and_stages_that_take_no_time_are_the_closed_form(schedule: Schedule) -> None:
    assert step_ms(schedule) == pytest.approx(closed_form_ms(schedule), abs=1e-6)


def test_the_closed_form_would_notice_a_link_without_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Schedule(forward_ms=1, backward_ms=4, buckets=(one_hop(1, 5), one_hop(4, 5)), end_ms=1, has_stages=False)
    assert step_ms(schedule) == pytest.approx(1 + 11 + 1)

    def send_at_once(self: clock_module.Clock, ms: float) -> clock_module.Signal:
        done = clock_module.Signal()
        self.set(done)
        return done

    monkeypatch.setattr(clock_module.Clock, "send", send_at_once)
    assert step_ms(schedule) != pytest.approx(closed_form_ms(schedule))


def test_the_order_is_that_of_the_engines_note() -> None:
    """a1 | b1 a2 | c1 b2 (a is done) | c2"""
    first, second, third = worker_order([2, 2, 2])
    assert first == [(0, 0)]
    assert second == [(1, 0), (0, 1)]
    assert third == [(2, 0), (1, 1), (0, 2), (2, 1), (1, 2), (2, 2)]


def test_two_collectives_a_bucket_by_hand() -> None:
    """Ready at 2 and 4. a1 3-7, worked 7-8 by the worker after it has launched b1 (it waits for a1 first as b came)."""
    schedule = Schedule(
        forward_ms=10,
        backward_ms=5,
        buckets=(
            BucketWork(ready_ms=2, hops=(Hop(1, 4), Hop(1, 2)), after_ms=1),
            BucketWork(ready_ms=4, hops=(Hop(1, 3), Hop(0, 1)), after_ms=1),
        ),
    )
    # From backward's start. a: code 2-3, a1 3-7. b: code 4-5, b1 queued, 7-10. a: waits to 7, code 7-8, a2 10-12.
    # Drained in the order of launches: b waits to 10, b2 queued, 12-13; a waits to 12, code 12-13; b code 13-14.
    assert step_ms(schedule) == pytest.approx(10 + 14)


def test_a_gather_that_is_left_to_the_forward_is_waited_for_where_it_is_needed() -> None:
    buckets = BucketWork(ready_ms=1, hops=(Hop(0, 1),)), BucketWork(ready_ms=2, hops=(Hop(0, 1),))
    early, late = Gather(needed_ms=0, link_ms=3), Gather(needed_ms=2, link_ms=5)  # The last layers: needed last.
    schedule = Schedule(forward_ms=4, backward_ms=2, buckets=buckets, gathers=(early, late))
    # A step: early's gather 0-3 and late's 3-8. Forward waits to 3, computes to 5, waits to 8, computes to 10; backward
    # to 12, reduced at 13.
    assert step_ms(schedule) == pytest.approx(13)
    # What DDP broadcasts before the forward waits for the first gather alone: to 4, late's gather 4-9, then as before.
    assert step_ms(dataclasses.replace(schedule, begin_link_ms=1)) == pytest.approx(14)
    hidden = dataclasses.replace(schedule, gathers=(Gather(2, 3), Gather(4, 5)))
    # Forward 0-2, waits to 3, computes to 5, waits to 8; backward to 10, reduced at 11.
    assert step_ms(hidden) == pytest.approx(11)


def test_threads_that_share_a_core_and_a_link_that_takes_from_it() -> None:
    schedule = Schedule(
        forward_ms=0,
        backward_ms=11,
        buckets=(BucketWork(ready_ms=1, hops=(Hop(5, 0),)),),
        rates=Rates(threads=0.5),
    )
    # 1 ms alone, 10 ms of both (5 of the worker's, 5 of backward's), 5 ms alone.
    assert step_ms(schedule) == pytest.approx(16)
    beside = Schedule(
        forward_ms=0,
        backward_ms=11,
        buckets=(one_hop(1, 4),),
        has_stages=False,
        rates=Rates(compute_beside_link=0.5, link_beside_compute=0.5),
    )
    # 1 ms alone, 8 ms of both (4 ms sent, 4 computed), 6 ms alone.
    assert step_ms(beside) == pytest.approx(15)
    delayed = dataclasses.replace(beside, rates=Rates(link_delay_ms=6))
    # 1 ms alone, 10 ms of both: 6 of waiting for a core and 4 of sending. What is sent behind backward has no delay.
    assert step_ms(delayed) == pytest.approx(11)
    behind = dataclasses.replace(delayed, buckets=(one_hop(11, 4),))
    assert step_ms(behind) == pytest.approx(15)


def test_an_inline_pass_computes_on_the_training_thread() -> None:
    schedule = Schedule(
        forward_ms=0, backward_ms=4, buckets=(one_hop(1, 2, compute_ms=3, after_ms=1), one_hop(4, 2)), is_inline=True
    )
    # Code 1-4, sent 4-6; backward's other 3 ms to 7, b sent 7-9; a's code 7-8; done at 9.
    assert step_ms(schedule) == pytest.approx(9)
    assert step_ms(dataclasses.replace(schedule, is_inline=False)) < 9


@settings(max_examples=60, deadline=None)
@given(schedule=schedules(has_stages=True), more_ms=MS, place=st.integers(0, 5), after_ms=MS)
def test_more_work_never_makes_a_step_shorter(schedule: Schedule, more_ms: float, place: int, after_ms: float) -> None:
    buckets = list(schedule.buckets)
    place %= len(buckets)
    one = buckets[place]
    buckets[place] = dataclasses.replace(one, hops=(Hop(0, one.hops[0].link_ms + more_ms),), after_ms=after_ms)
    assert step_ms(dataclasses.replace(schedule, buckets=tuple(buckets))) >= step_ms(schedule) - 1e-6


@settings(max_examples=60, deadline=None)
@given(
    hops=st.lists(st.lists(st.tuples(MS, MS), min_size=1, max_size=3), min_size=1, max_size=5),
    forward_ms=MS,
    gaps=st.lists(MS, min_size=5, max_size=5),
)
def test_no_step_beats_its_computation_or_its_link(
    hops: list[list[tuple[float, float]]], forward_ms: float, gaps: list[float]
) -> None:
    ready_ms = [sum(gaps[: place + 1]) for place in range(len(hops))]
    buckets = tuple(
        BucketWork(ready_ms=ready, hops=tuple(Hop(*hop) for hop in own), after_ms=0.5)
        for ready, own in zip(ready_ms, hops, strict=True)
    )
    schedule = Schedule(forward_ms=forward_ms, backward_ms=ready_ms[-1] + 1, buckets=buckets)
    took_ms = step_ms(schedule)
    assert took_ms >= forward_ms + schedule.backward_ms - 1e-6
    assert took_ms >= forward_ms + sum(link for own in hops for _, link in own) - 1e-6
    everything = forward_ms + schedule.backward_ms + sum(sum(hop) for own in hops for hop in own) + 0.5 * len(hops)
    assert took_ms <= everything + 1e-6
