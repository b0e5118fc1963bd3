"""What ``on_exhausted`` does when the first rank runs out."""

import re
from typing import Any

import pytest
import torch
from join_loops import TOLD_BY, assert_same_on_every_rank, joined, make, overlapped_body, snapshot

from harness import on_ranks, wrap
from harness.models import BATCH_NORM, MLP, mean_squared_error
from overlap import ConfigurationError, Join, TrainingLoopError

_BATCHES = (5, 3)


def _batches(rank: int) -> list[Any]:
    return BATCH_NORM.batches(rank, steps=_BATCHES[rank])


def _train(batches: list[Any], told_by: str, ran: list[Any], **options: Any) -> Any:
    ddp = wrap(BATCH_NORM.model(), **BATCH_NORM.ddp_options())
    optimizer = make(ddp, "interleaved", lr=0.1)
    with joined([ddp, optimizer], batches, told_by, **options) as iterated:
        for batch in iterated:
            overlapped_body(ddp, optimizer, batch, 1.0)
            ran.append(batch)
        if options == {"on_exhausted": "stop"}:
            with torch.no_grad():
                ddp(*batches[0].inputs)  # All ranks are in step here.
    return snapshot(ddp, None)


def _counts_the_ranks_that_have_batches(rank: int) -> None:
    ddp = wrap(torch.nn.Linear(1, 1, bias=False))

    def trained(batches: Any, **options: Any) -> list[Any]:
        drawn = []
        with Join([ddp], divide_by_initial_world_size=False, **options) as join:
            for number in join.iterate(batches):
                ddp.zero_grad()
                ddp(torch.ones(1, 1)).sum().backward()
                assert ddp.module.weight.grad.item() == 1
                drawn.append(number)
        return drawn

    batches = list(range(4 - 2 * rank))
    assert trained(batches, on_exhausted="stop") == [0, 1]
    assert trained(batches) == batches
    with pytest.warns(UserWarning, match=r"ranks \[1\] have no batches, so on_exhausted=\"stop\" ends"):
        assert trained(batches[2:], on_exhausted="stop") == []


@on_ranks(2, timeout_s=120)
def test_ranks_stop_or_raise_together_when_the_first_runs_out(rank: int, world_size: int) -> None:
    ran: list[Any] = []
    ended = _train(_batches(rank), "batches", ran, on_exhausted="stop")
    assert len(ran) == 3
    with pytest.raises(ConfigurationError, match=r"join\.iterate"):
        _train(_batches(rank), "forwards", [], on_exhausted="stop")
    # PyTorch's words, which its tests and users match on.
    first = (
        "Detected at least one rank that exhausted inputs. Throwing across all ranks.",
        "Rank 1 exhausted all inputs.",
    )
    for told_by in TOLD_BY:
        trained: list[Any] = []
        with pytest.raises(TrainingLoopError, match=f"^{re.escape(first[rank])} " + r"Ranks \[1\] ran out"):
            _train(_batches(rank), told_by, trained, throw_on_early_termination=True)
        assert len(trained) == 3
        trained = []
        _train(_batches(rank)[:3], told_by, trained, throw_on_early_termination=True)
        assert len(trained) == 3
    _counts_the_ranks_that_have_batches(rank)
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    with Join([ddp], enable=False) as join:
        for batch in join.iterate(_batches(rank)[:2]):
            mean_squared_error(ddp, batch).backward()
    assert_same_on_every_rank(ended, what="stopped")
