"""A rank that has lost a connection learns from the store which ranks have to do with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from overlap._torch import stores
from overlap.errors import CollectiveError
from overlap.join import failures
from overlap.join.failures import FailureStore, explain_loss, failures_on

_LOST = RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Timed out")


class _Group:
    """One rank's view of a group."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _get_backend(self, device: Any) -> Any:
        raise RuntimeError("no backend")


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Three ranks' views of one group, whose store is in memory."""
    store = dist.HashStore()
    monkeypatch.setattr(stores, "group_store", lambda group: store)
    monkeypatch.setattr(failures, "_SURVEY_S", 0.1)
    return [_Group(rank, 3) for rank in range(3)]


def test_the_ranks_of_which_nothing_is_heard_are_named(groups: list[Any]) -> None:
    boards = [FailureStore(group, "0") for group in groups]
    boards[0].say_stopped()
    assert boards[1].lost_in_words() == "no word from rank 2, whose process has ended, or hangs"


def test_where_all_have_stopped_those_that_had_done_less_are_named(groups: list[Any]) -> None:
    boards = [FailureStore(group, "0") for group in groups]
    for board, finished in zip(boards, (4, 4, 3), strict=True):
        board.finished = finished
        board.say_stopped()
    first, last = boards[0].lost_in_words(), boards[2].lost_in_words()
    assert first.startswith("ranks 1, 2 stopped, too") and "rank 2 had finished fewer collectives" in first
    assert last.startswith("ranks 0, 1 stopped, too") and "fewer" not in last


def test_a_rank_that_stopped_elsewhere_in_the_group_is_there(groups: list[Any]) -> None:
    FailureStore(groups[0], "0").say_stopped()
    failures_on(groups[2]).say_stopped()  # In a forward, say.
    board = FailureStore(groups[1], "1")
    assert board.lost_in_words().startswith("ranks 0, 2 stopped, too")
    assert not FailureStore(groups[1], "2").somebody_stopped(), "that is another use of the group"


def test_a_rank_that_is_back_is_not_taken_for_one_that_has_stopped(groups: list[Any]) -> None:
    boards = [FailureStore(group, "0") for group in groups]
    for board in boards:
        board.say_stopped()
    later = [FailureStore(group, "1") for group in groups]
    for board in later:
        board.say_back()
    later[0].say_stopped()
    assert later[1].lost_in_words() == "no word from rank 2, whose process has ended, or hangs"


def test_an_error_that_names_nobody_gets_a_note(groups: list[Any]) -> None:
    lost, other, ours = RuntimeError(*_LOST.args), RuntimeError("a shape is wrong"), CollectiveError(*_LOST.args)
    for error in (lost, other, ours):
        explain_loss(error, groups[1])
    assert lost.__notes__ == ["no word from ranks 0, 2, whose process has ended, or hangs"]
    assert not hasattr(other, "__notes__") and not hasattr(ours, "__notes__")
