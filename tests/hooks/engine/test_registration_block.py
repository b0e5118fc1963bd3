"""A registration as a block: an exception of the loop reaches the other ranks, and all can go on."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import AllReduce, OverlappedOptimizer, PeerError, Step, chain

from ..failing import Flaky

_TIMEOUT_S = 12


def _model() -> tuple[Any, Any, Any]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))
    return ddp, optimizer, chain(AllReduce(), Step(optimizer, deferred=True))


def _step(ddp: Any, optimizer: Any, step: int, rank: int) -> None:
    mean_squared_error(ddp, MLP.batch(step, rank)).backward()
    optimizer.step()


def _reported(rank: int, world_size: int) -> None:
    """Rank 1 raises between two steps, in which the others wait for it; then all go on with the same registration."""
    ddp, optimizer, stage = _model()
    registration = stage.register(ddp)
    for step in range(3):
        _step(ddp, optimizer, step, rank)
    start_s = time.monotonic()
    if rank == 1:
        registration.report(ValueError("the dog ate it"))
    else:
        with pytest.raises(PeerError, match="rank 1: ValueError: the dog ate it"):
            _step(ddp, optimizer, 3, rank)
    assert time.monotonic() - start_s < _TIMEOUT_S / 2
    for step in range(3, 5):
        _step(ddp, optimizer, step, rank)
    ours = {name: value.detach().clone() for name, value in ddp.module.named_parameters()}
    twin, plain = wrap(MLP.model(), **MLP.ddp_options()), None
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(5):
        plain.zero_grad()
        _step(twin, plain, step, rank)
    assert_parity(ours, dict(twin.module.named_parameters()), what="after a failure")


def test_an_exception_of_the_loop_that_is_reported_reaches_the_others_and_all_go_on() -> None:
    run_ranks(_reported, 2, group_timeout_s=_TIMEOUT_S)


def _in_a_block(rank: int, world_size: int) -> None:
    ddp, optimizer, stage = _model()

    def run() -> None:
        with stage.register(ddp) as registration:
            for step in range(4):
                if (rank, step) == (1, 2):
                    raise ValueError("the dog ate it")
                _step(ddp, optimizer, step, rank)
            assert registration.is_active

    start_s = time.monotonic()
    with pytest.raises(ValueError if rank == 1 else PeerError, match="the dog ate it"):
        run()
    assert time.monotonic() - start_s < _TIMEOUT_S / 2
    with stage.register(ddp) as registration:
        _step(ddp, optimizer, 2, rank)
    assert not registration.is_active


def test_a_block_reports_what_the_loop_raises_and_removes_the_registration() -> None:
    run_ranks(_in_a_block, 2, group_timeout_s=_TIMEOUT_S)


def _fails_in_a_block(rank: int, world_size: int, in_model: bool) -> None:
    """Rank 1 fails in a backward, and all leave the block: nobody waits for those that have left."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())

    def run() -> None:
        with chain(Flaky(2, 1, after=False, enabled=rank == 1 and not in_model)).register(ddp):
            for step in range(4):
                loss = mean_squared_error(ddp, MLP.batch(step, rank))
                if in_model and (rank, step) == (1, 2):
                    next(ddp.parameters()).register_hook(_raise)
                loss.backward()

    start_s = time.monotonic()
    with pytest.raises(ValueError if rank == 1 else PeerError):
        run()
    assert time.monotonic() - start_s < _TIMEOUT_S / 2


def _raise(gradient: torch.Tensor) -> None:
    raise ValueError("the dog ate it")


@pytest.mark.parametrize("in_model", [False, True], ids=["in a stage", "in the model"])
def test_what_backward_has_told_the_others_a_block_does_not_tell_again(in_model: bool) -> None:
    run_ranks(_fails_in_a_block, 2, in_model, group_timeout_s=_TIMEOUT_S)
