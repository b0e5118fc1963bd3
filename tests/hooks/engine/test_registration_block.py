"""A registration as a block: an exception of the loop reaches the other ranks, and all can go on."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from harness import run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import AllReduce, OverlappedOptimizer, PeerError, Step, chain

_TIMEOUT_S = 12


def _model() -> tuple[Any, Any, Any]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))
    return ddp, optimizer, chain(AllReduce(), Step(optimizer, deferred=True))


def _step(ddp: Any, optimizer: Any, step: int, rank: int) -> None:
    mean_squared_error(ddp, MLP.batch(step, rank)).backward()
    optimizer.step()


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
