"""Intervals of a step, the table and the trace of reports made by hand: no process group, no model."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlap.timeline import Activity, BucketReport, Interval, Report, Span, StepReport
from overlap.timeline.report import hull, intersection, length_ms, trace_events, union, without


def bucket(index: int, ready_ms: float, *activities: Activity) -> BucketReport:
    return BucketReport(index=index, gradient_bytes=1000, ready_ms=ready_ms, activities=activities)


def reduce(start_ms: float, end_ms: float) -> Activity:
    return Activity(start_ms, end_ms, "reduce", "all_reduce", True, 1000)


def update(start_ms: float, end_ms: float) -> Activity:
    return Activity(start_ms, end_ms, "update", "Step(SGD, interleaved)", False)


def step(rank: int = 0, number: int = 0) -> StepReport:
    """Backward ends at 60; the last bucket is reduced at 80 and updated at 85; DDP copies until 90."""
    return StepReport(
        rank=rank,
        step=number,
        step_ms=100.0,
        phases=(
            Span(0.0, 4.0, "buffers"),
            Span(4.0, 20.0, "forward"),
            Span(20.0, 22.0, "loss"),
            Span(22.0, 60.0, "backward"),
            Span(60.0, 90.0, "finalization"),
            Span(92.0, 95.0, "optimizer"),
        ),
        buckets=(
            bucket(0, 40.0, reduce(41.0, 55.0), update(56.0, 57.0)),
            bucket(1, 60.0, reduce(60.0, 80.0), update(80.0, 85.0), update(85.0, 85.1)),
        ),
    )


def report(ranks: int = 2, steps: int = 3) -> Report:
    return Report(
        title="plain DDP",
        ranks=tuple(tuple(step(rank, number) for number in range(steps)) for rank in range(ranks)),
    )


# Intervals ---------------------------------------------------------------------------------------------------

INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 10)).map(lambda pair: Interval(pair[0], pair[0] + pair[1])), max_size=8
)


def _moments(intervals: Iterable[Interval]) -> set[int]:
    return {moment for one in intervals for moment in range(int(one.start_ms), int(one.end_ms))}


@given(INTERVALS)
def test_a_union_and_its_length_are_those_of_sets(intervals: list[Interval]) -> None:
    assert _moments(union(intervals)) == _moments(intervals)
    assert length_ms(intervals) == len(_moments(intervals))
    around = hull(intervals)
    assert around is None if not intervals else _moments([around]) >= _moments(intervals)  # type: ignore[list-item]


@given(INTERVALS, INTERVALS)
def test_intersection_and_difference_are_those_of_sets(left: list[Interval], right: list[Interval]) -> None:
    assert _moments(intersection(left, right)) == _moments(left) & _moments(right)
    assert _moments(without(left, right)) == _moments(left) - _moments(right)


def test_what_follows_from_the_intervals_of_a_step() -> None:
    one = step()
    assert one.communication_ms == 4 + 14 + 20
    assert one.exposed_ms == 4 + 20, "the broadcast of buffers and the last bucket's collective"
    assert one.overlap_fraction == pytest.approx(14 / 38)
    assert one.sent_bytes == 2000
    first, last = one.buckets
    assert (first.ready_ms, first.reduce, first.gather) == (40.0, Interval(41.0, 55.0), None)
    assert last.update == Interval(80.0, 85.0), "the longest stretch of its code"
    assert last.done_ms == 85.1


def test_a_step_without_communication_has_nothing_exposed() -> None:
    one = StepReport(rank=0, step=0, step_ms=9.0, phases=(Span(5.0, 6.0, "finalization"),), buckets=())
    assert (one.communication_ms, one.exposed_ms, one.overlap_fraction) == (0, 0, None)


def test_waiting_for_a_collective_in_the_middle_of_backward_is_exposed() -> None:
    one = StepReport(
        rank=0,
        step=0,
        step_ms=50.0,
        phases=(Span(0.0, 40.0, "backward"), Span(10.0, 15.0, "wait"), Span(40.0, 41.0, "finalization")),
        buckets=(bucket(0, 10.0, reduce(10.0, 15.0)),),
    )
    assert (one.exposed_ms, one.overlap_fraction) == (5.0, 0.0)


# As text -----------------------------------------------------------------------------------------------------


def test_a_report_is_a_table_with_a_line_for_each_step() -> None:
    lines = str(report()).splitlines()
    assert lines[0] == "plain DDP on 2 ranks, times in ms"
    assert " ".join(lines[1].split()) == (
        "rank step step ms forward backward finalization optimizer communication exposed overlapped sent MB"
    )
    assert " ".join(lines[2].split()) == "0 0 100.0 16.0 38.0 30.0 3.0 38.0 24.0 37% 0.00"
    assert len({len(line) for line in lines[1:8]}) == 1, "columns are aligned"


def test_a_table_ends_with_the_buckets_of_the_median_step() -> None:
    lines = str(report()).splitlines()
    assert lines[9].startswith("buckets of step 2 on rank 0")
    assert " ".join(lines[-1].split()) == "1 0.00 60.0 60.0 to 80.0 80.0 to 85.0 - 0.00"


def test_a_report_without_steps_says_so() -> None:
    assert "no step was recorded" in str(Report(title="plain DDP", ranks=((), ())))


# As a trace --------------------------------------------------------------------------------------------------


def test_a_trace_has_every_step_of_every_rank_one_after_the_other() -> None:
    events = list(trace_events(report()))
    assert {event["pid"] for event in events} == {0, 1}
    steps, started = report().ranks[1], [event for event in events if event["pid"] == 1 and event["ph"] == "b"]
    activities = [
        (sum(one.step_ms for one in steps[:number]), bucket, activity)
        for number, step in enumerate(steps)
        for bucket in step.buckets
        for activity in bucket.activities
    ]
    assert [event["ts"] for event in started] == [1e3 * (start + one.start_ms) for start, _, one in activities]
    assert [event["name"] for event in started] == [f"{one.label} [bucket {of.index}]" for _, of, one in activities]
    exposed = [event["dur"] for event in events if event["pid"] == 1 and event["name"] == "exposed communication"]
    assert sum(exposed) == pytest.approx(1e3 * sum(step.exposed_ms for step in steps))
