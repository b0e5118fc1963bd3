"""Waiting for a collective on the host: with patience, and never longer than there is something to wait for."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from overlap import CollectiveError, PeerError
from overlap.hooks.engine.executors import Executor
from overlap.ranks.board import Board


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


def _executor(*failures: str | None) -> Executor:
    """One that finds these failures of other ranks on its board, one each time it polls."""
    board: Any = object.__new__(Board)
    board._event, reports = "of the group failed first", iter(failures)
    board.failure = lambda: next(reports, None)
    channels: Any = SimpleNamespace(board=board, group=None)
    return Executor(channels)


def test_a_collective_that_outlasts_the_poll_has_not_failed_and_one_that_has_is_an_error() -> None:
    for timeouts in (0, 3):
        _executor().wait(_Work(timeouts))  # type: ignore[arg-type]
        with pytest.raises(CollectiveError, match=r"no rank has reported an error.*connection closed"):
            _executor().wait(_Work(timeouts, "connection closed"))  # type: ignore[arg-type]


class _CannotBeLaunched:
    def __init__(self, error: str) -> None:
        self.error = error

    def launch(self, channels: object) -> None:
        raise RuntimeError(self.error)


def test_what_cannot_be_launched_is_an_error() -> None:
    lost: Any = _CannotBeLaunched("[/gloo/transport/tcp/pair.cc] connection closed")
    with pytest.raises(CollectiveError, match="could not be launched, and no rank has reported an error"):
        _executor().launch(lost)
    with pytest.raises(PeerError, match="failed first: theirs"):
        _executor("theirs").launch(lost)
    unrelated: Any = _CannotBeLaunched("a shape is wrong")
    with pytest.raises(RuntimeError, match="a shape is wrong") as raised:
        _executor().launch(unrelated)
    assert not isinstance(raised.value, CollectiveError)


def test_another_ranks_failure_comes_first() -> None:
    with pytest.raises(PeerError, match="failed first: theirs"):
        _executor(None, "theirs").wait(_Work(5))  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="failed first: theirs"):
        _executor(None, "theirs").wait(_Work(1, "connection closed"))  # type: ignore[arg-type]
