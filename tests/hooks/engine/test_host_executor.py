"""Waiting for a collective on the host: with patience, and never longer than there is something to wait for."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from overlap import CollectiveError, PeerError
from overlap.hooks.engine.executors import HostExecutor


class _Work:
    """Is over after so many waits that time out; then it has failed or not."""

    def __init__(self, timeouts: int, error: str = "") -> None:
        self.timeouts, self.error = timeouts, error

    def is_completed(self) -> bool:
        return not self.timeouts

    def wait(self, timeout: timedelta | None = None) -> None:
        if self.timeouts:
            assert timeout is not None, "it would block"
            self.timeouts -= 1
            raise RuntimeError("not done yet")
        if self.error:
            raise RuntimeError(self.error)


def _executor(*failures: str | None) -> HostExecutor:
    """One that learns these failures of other ranks, one each time it looks."""
    told = iter(failures)
    failures = SimpleNamespace(
        read=lambda: next(told, None), lost_in_words=lambda: "no word from rank 1, whose process has ended", finished=0
    )
    channels: Any = SimpleNamespace(failures=failures)
    return HostExecutor(channels)


@pytest.mark.parametrize("timeouts", [0, 1, 3])
def test_what_is_done_a_moment_after_the_patience_has_ended_has_not_failed(timeouts: int) -> None:
    _executor().wait(_Work(timeouts))  # type: ignore[arg-type]


@pytest.mark.parametrize("timeouts", [0, 1, 3])
def test_what_has_failed_is_an_error(timeouts: int) -> None:
    with pytest.raises(
        CollectiveError, match=r"no rank reported an error of its own.*no word from rank 1.*connection closed"
    ):
        _executor().wait(_Work(timeouts, "connection closed"))  # type: ignore[arg-type]


def test_what_cannot_be_launched_names_the_rank_that_is_silent() -> None:
    raised = RuntimeError("[/gloo/transport/tcp/pair.cc] connection closed")
    error = _executor().explained(raised)
    assert isinstance(error, CollectiveError)
    assert "could not be launched" in str(error) and "no word from rank 1" in str(error)
    assert isinstance(_executor("theirs").explained(raised), PeerError)
    unrelated = RuntimeError("a shape is wrong")
    assert _executor().explained(unrelated) is unrelated


def test_another_ranks_failure_comes_first() -> None:
    with pytest.raises(PeerError, match="failed first: theirs"):
        _executor(None, "theirs").wait(_Work(5))  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="failed first: theirs"):
        _executor(None, "theirs").wait(_Work(1, "connection closed"))  # type: ignore[arg-type]
