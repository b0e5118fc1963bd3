"""A failure under Join is named on every rank, and never waited for without end."""

from __future__ import annotations

import time
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from join_loops import BATCHES, joined, overlapped_body

from harness import run_ranks, wrap
from harness.models import MLP
from overlap import AllReduce, Join, OverlappedOptimizer, PeerError, Step, TrainingLoopError, chain
from overlap.join.replay import SKEW_TO_WARN_OF

_TIMEOUT_S = 6


class Loader:
    """Says that it has so many batches, and has others."""

    def __init__(self, said: int, has: int, rank: int) -> None:
        self.said, self.has, self.rank = said, has, rank

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Any:
        return (MLP.batch(step, self.rank) for step in range(self.has))


def _model(*, registered: bool) -> tuple[Any, Any]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if not registered:
        return ddp, optimizer
    overlapped = OverlappedOptimizer(optimizer)
    chain(AllReduce(), Step(overlapped)).register(ddp)
    return ddp, overlapped


def _said_wrong(rank: int, world_size: int, said: int, has: int, told_by: str) -> str:
    """Rank 1 has other than it said, rank 0 what it said, and more or fewer than rank 1."""
    ddp, optimizer = _model(registered=True)
    loader = Loader(said, has, rank) if rank == 1 else Loader(4, 4, rank)
    options = {"lengths": len(loader)} if told_by == "lengths" else {}
    with Join([ddp, optimizer], **options) as join:
        for batch in join.iterate(loader) if told_by == "loader" else loader:
            overlapped_body(ddp, optimizer, batch, 1.0)
    return "no error"


@pytest.mark.parametrize("told_by", ["lengths", "loader"])
@pytest.mark.parametrize(("said", "has"), [(4, 6), (2, 3), (4, 2), (6, 5)])
def test_a_rank_that_ran_other_than_it_said_is_named_on_every_rank(said: int, has: int, told_by: str) -> None:
    start_s = time.monotonic()
    waiting, wrong = run_ranks(
        _said_wrong, 2, said, has, told_by, group_timeout_s=_TIMEOUT_S, return_exceptions=True, timeout_s=40
    )
    assert isinstance(wrong, TrainingLoopError)
    assert "rank 1" in str(wrong) and str(said) in str(wrong)
    assert isinstance(waiting, PeerError)
    assert "rank 1" in str(waiting)
    assert time.monotonic() - start_s < 4 * _TIMEOUT_S


def _fails(rank: int, world_size: int, told_by: str, registered: bool) -> Any:
    """Rank 1 raises in its third iteration; rank 2 has left by then."""
    ddp, optimizer = _model(registered=registered)
    start_s = time.monotonic()
    try:
        batches = [MLP.batch(step, rank) for step in range((6, 5, 1)[rank])]
        with joined([ddp], batches, told_by) as iterated:
            for number, batch in enumerate(iterated):
                if rank == 1 and number == 2:
                    start_s = time.monotonic()
                    raise ValueError("the dog ate it")
                overlapped_body(ddp, optimizer, batch, 1.0)
    except Exception as error:
        return error, time.monotonic() - start_s
    return None


@pytest.mark.parametrize(("told_by", "registered"), [("loader", True), ("stream", True), ("forwards", False)])
def test_an_exception_on_one_rank_is_named_on_the_others(told_by: str, registered: bool) -> None:
    results = run_ranks(_fails, 3, told_by, registered, group_timeout_s=_TIMEOUT_S, timeout_s=40)
    error, took_s = results[1]
    assert isinstance(error, ValueError) and took_s < 1
    for rank in (0, 2):
        error, took_s = results[rank]
        assert isinstance(error, PeerError), error
        assert "rank 1" in str(error) and "the dog ate it" in str(error)


def _skewed(rank: int, world_size: int) -> list[str]:
    ddp, optimizer = _model(registered=True)
    batches = [MLP.batch(0, rank)] * (60 if rank == 0 else 3)
    skew = mock.patch("overlap.join.replay.SKEW_TO_WARN_OF", 50)
    with skew, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with joined([ddp, optimizer], batches, "loader") as iterated:
            for batch in iterated:
                overlapped_body(ddp, optimizer, batch, 1.0)
    return [str(each.message) for each in caught]


def test_a_rank_that_replays_long_is_warned_of_once_by_number() -> None:
    active, joined_rank = run_ranks(_skewed, 2)
    assert not active and SKEW_TO_WARN_OF == 1000
    assert len(joined_rank) == 1
    assert "rank 1 ran out after 3 iterations and has replayed 50" in joined_rank[0]


def test_ranks_of_these_tests_have_different_numbers_of_batches() -> None:
    assert len(set(BATCHES)) == len(BATCHES), "or the loops of these tests would not be uneven"
