"""Where a gather that rides into the next forward has failed, a checkpoint can be loaded and training goes on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import overlap
from harness import run_ranks, wrap
from harness.models import MLP
from overlap import PeerError, ZeroRedundancyOptimizer, ZeroStep, chain
from overlap.optim.zero.exchange import Exchange


def _made() -> tuple[Any, Any]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.01, momentum=0.9, overlap_with_ddp=True)
    chain(ZeroStep(zero, gather="forward")).register(ddp)
    return ddp, zero


def _step(ddp: Any, zero: Any, step: int, rank: int) -> None:
    ddp(*MLP.batch(step, rank).inputs).square().mean().backward()
    zero.step()


def _goes_on(rank: int, world_size: int) -> None:
    unbroken, its_zero = _made()
    for step in range(4):
        _step(unbroken, its_zero, step, rank)
    ddp, zero = _made()
    _step(ddp, zero, 0, rank)
    model, state = copy.deepcopy(ddp.state_dict()), copy.deepcopy(overlap.state_dict(ddp, zero))

    gather = Exchange.gather
    count = 0

    async def fails(self: Exchange, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if rank == 0 and count == 1:
            raise ValueError("the dog ate it")
        await gather(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Exchange, "gather", fails)
        _step(ddp, zero, 1, rank)
        for _ in range(2):  # Whoever reads them is told, each time.
            with pytest.raises(ValueError if rank == 0 else PeerError, match="the dog ate it"):
                _step(ddp, zero, 2, rank)
        ddp.module[0].load_state_dict({name: model[f"module.0.{name}"] for name in ("weight", "bias")})
        with pytest.raises(ValueError if rank == 0 else PeerError, match="the dog ate it"):
            _step(ddp, zero, 2, rank)
        ddp.load_state_dict(model)
        overlap.load_state_dict(ddp, zero, state)
    for step in range(1, 4):
        _step(ddp, zero, step, rank)
    for ours, its in zip(ddp.parameters(), unbroken.parameters(), strict=True):
        assert torch.equal(ours, its)


def test_a_checkpoint_can_be_loaded_after_a_gather_has_failed() -> None:
    run_ranks(_goes_on, 2)
