"""Arithmetic of intervals."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from overlap.timeline import Interval
from overlap.timeline.spans import hull, intersection, lanes, length_ms, union, without

INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 10)).map(lambda pair: Interval(pair[0], pair[0] + pair[1])), max_size=8
)


def _moments(intervals: Iterable[Interval]) -> set[int]:
    return {moment for one in intervals for moment in range(int(one.start_ms), int(one.end_ms))}


@given(INTERVALS)
def test_a_union_and_its_length_are_those_of_sets(intervals: list[Interval]) -> None:
    assert _moments(union(intervals)) == _moments(intervals)
    assert length_ms(intervals) == len(_moments(intervals))


@given(INTERVALS, INTERVALS)
def test_intersection_and_difference_are_those_of_sets(left: list[Interval], right: list[Interval]) -> None:
    assert _moments(intersection(left, right)) == _moments(left) & _moments(right)
    assert _moments(without(left, right)) == _moments(left) - _moments(right)


@given(INTERVALS)
def test_a_hull_holds_every_interval(intervals: list[Interval]) -> None:
    around = hull(intervals)
    assert around is None if not intervals else _moments([around]) >= _moments(intervals)  # type: ignore[list-item]


@given(INTERVALS)
def test_no_two_intervals_of_a_lane_overlap_and_no_lane_is_spare(intervals: list[Interval]) -> None:
    chosen = lanes(intervals)
    for lane in set(chosen):
        own = [one for one, place in zip(intervals, chosen, strict=True) if place == lane]
        assert sum(one.duration_ms for one in own) == length_ms(own)
    crowd = max((sum(moment in _moments([one]) for one in intervals) for moment in range(51)), default=0)
    assert len(set(chosen)) == crowd
