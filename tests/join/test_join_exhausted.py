"""What ``on_exhausted`` does when the first rank runs out."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from join_loops import TOLD_BY, joined, overlapped_body

from harness import run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import AllReduce, ConfigurationError, Join, OverlappedOptimizer, Step, TrainingLoopError, chain

_BATCHES = (5, 3)


def _model() -> tuple[Any, Any]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))
    chain(AllReduce(), Step(optimizer)).register(ddp)
    return ddp, optimizer


def _batches(rank: int) -> list[Any]:
    return [MLP.batch(step, rank) for step in range(_BATCHES[rank])]


def _train(batches: list[Any], told_by: str, ran: list[Any], **options: Any) -> None:
    ddp, optimizer = _model()
    with joined([ddp, optimizer], batches, told_by, **options) as iterated:
        for batch in iterated:
            overlapped_body(ddp, optimizer, batch, 1.0)
            ran.append(batch)


def _stops(rank: int, world_size: int, told_by: str) -> int:
    ddp, optimizer = _model()
    batches = _batches(rank)
    ran = 0
    with joined([ddp, optimizer], batches, told_by, on_exhausted="stop") as iterated:
        for batch in iterated:
            overlapped_body(ddp, optimizer, batch, 1.0)
            ran += 1
        # All ranks are in step here.
        with torch.no_grad():
            ddp(*batches[0].inputs)
    return ran


@pytest.mark.parametrize("told_by", ["loader", "stream"])
def test_stop_ends_the_loop_on_all_ranks_at_the_same_iteration(told_by: str) -> None:
    assert run_ranks(_stops, 2, told_by) == [3, 3]


def _stops_without_iterate(rank: int, world_size: int, told_by: str) -> None:
    with pytest.raises(ConfigurationError, match=r"join\.iterate"):
        _train(_batches(rank), told_by, [], on_exhausted="stop")


@pytest.mark.parametrize("told_by", ["forwards", "lengths"])
def test_stop_needs_iterate(told_by: str) -> None:
    run_ranks(_stops_without_iterate, 2, told_by)


def _raises(rank: int, world_size: int, told_by: str, options: dict[str, Any]) -> int:
    ran: list[Any] = []
    # PyTorch's words, which its tests and users match on.
    first = (
        "Detected at least one rank that exhausted inputs. Throwing across all ranks.",
        "Rank 1 exhausted all inputs.",
    )
    with pytest.raises(TrainingLoopError, match=f"^{re.escape(first[rank])} " + r"Ranks \[1\] ran out"):
        _train(_batches(rank), told_by, ran, **options)
    return len(ran)


@pytest.mark.parametrize("told_by", TOLD_BY)
@pytest.mark.parametrize(
    "options",
    [{"on_exhausted": "raise"}, {"throw_on_early_termination": True}],
    ids=lambda options: next(iter(options)),
)
def test_raise_raises_on_all_ranks_when_the_first_runs_out(told_by: str, options: dict[str, Any]) -> None:
    assert run_ranks(_raises, 2, told_by, options) == [3, 3]


def _raises_nothing(rank: int, world_size: int, told_by: str) -> int:
    ran: list[Any] = []
    _train(_batches(rank)[:3], told_by, ran, on_exhausted="raise")
    return len(ran)


@pytest.mark.parametrize("told_by", TOLD_BY)
def test_raise_raises_nothing_where_all_ranks_have_equally_many_batches(told_by: str) -> None:
    assert run_ranks(_raises_nothing, 2, told_by) == [3, 3]


def _disabled(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    with Join([ddp], enable=False) as join:
        for batch in join.iterate(_batches(rank)[:2]):
            mean_squared_error(ddp, batch).backward()


def test_a_disabled_join_leaves_the_loop_as_it_is() -> None:
    run_ranks(_disabled, 2)
