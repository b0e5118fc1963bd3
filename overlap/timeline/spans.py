"""Stretches of time, and what they have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Interval", "hull", "intersection", "length_ms", "lanes", "moved", "union", "without"]


@dataclass(frozen=True)
class Interval:
    """A stretch of time, in ms from the start of its step."""

    start_ms: float
    end_ms: float

    @property
    def duration_ms(self) -> float:
        """How long it is."""
        return self.end_ms - self.start_ms


def moved(interval: Interval, by_ms: float) -> Interval:
    """The same stretch, later."""
    return Interval(interval.start_ms + by_ms, interval.end_ms + by_ms)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same stretches in order, those that touch or overlap made one.

    >>> union([Interval(4, 5), Interval(0, 2), Interval(1, 3)])
    [Interval(start_ms=0, end_ms=3), Interval(start_ms=4, end_ms=5)]
    """
    merged: list[Interval] = []
    for interval in sorted(intervals, key=lambda one: one.start_ms):
        if merged and interval.start_ms <= merged[-1].end_ms:
            last = merged.pop()
            merged.append(Interval(last.start_ms, max(last.end_ms, interval.end_ms)))
        else:
            merged.append(Interval(interval.start_ms, interval.end_ms))
    return merged


def intersection(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """What lies in both.

    >>> intersection([Interval(0, 3)], [Interval(1, 2), Interval(2.5, 9)])
    [Interval(start_ms=1, end_ms=2), Interval(start_ms=2.5, end_ms=3)]
    """
    both = []
    others = union(right)
    for one in union(left):
        for other in others:
            start_ms, end_ms = max(one.start_ms, other.start_ms), min(one.end_ms, other.end_ms)
            if start_ms < end_ms:
                both.append(Interval(start_ms, end_ms))
    return both


def without(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """What of ``left`` does not lie in ``right``.

    >>> without([Interval(0, 3)], [Interval(1, 2)])
    [Interval(start_ms=0, end_ms=1), Interval(start_ms=2, end_ms=3)]
    """
    kept = union(left)
    for hole in union(right):
        kept = [
            part
            for one in kept
            for part in (
                Interval(one.start_ms, min(one.end_ms, hole.start_ms)),
                Interval(max(one.start_ms, hole.end_ms), one.end_ms),
            )
            if part.start_ms < part.end_ms
        ]
    return kept


def length_ms(intervals: Iterable[Interval]) -> float:
    """How long they are together, overlaps counted once.

    >>> length_ms([Interval(0, 2), Interval(1, 3), Interval(5, 6)])
    4
    """
    return sum(interval.duration_ms for interval in union(intervals))


def hull(intervals: Iterable[Interval]) -> Interval | None:
    """From the first start to the last end."""
    merged = union(intervals)
    return Interval(merged[0].start_ms, merged[-1].end_ms) if merged else None


def lanes(intervals: Sequence[Interval]) -> list[int]:
    """A lane for each interval, as few lanes as can be, so that no two in a lane overlap.

    >>> lanes([Interval(0, 4), Interval(1, 2), Interval(2, 3), Interval(4, 5)])
    [0, 1, 1, 0]
    """
    free_at_ms: list[float] = []
    chosen = [0] * len(intervals)
    for place in sorted(range(len(intervals)), key=lambda place: intervals[place].start_ms):
        interval = intervals[place]
        lane = next((n for n, end_ms in enumerate(free_at_ms) if end_ms <= interval.start_ms), len(free_at_ms))
        if lane == len(free_at_ms):
            free_at_ms.append(0.0)
        free_at_ms[lane] = interval.end_ms
        chosen[place] = lane
    return chosen
