"""Recordings that take turns are shown as one."""

from __future__ import annotations

from timeline.samples import report

from overlap.trace.experiment import joined


def test_recordings_in_turns_are_joined() -> None:
    whole = joined([report(), report()])
    assert [step.step for step in whole.ranks[1]] == [0, 1, 2, 3, 4, 5]
    assert [step.start_ms for step in whole.ranks[0]] == [0, 100, 200, 301, 401, 501]
