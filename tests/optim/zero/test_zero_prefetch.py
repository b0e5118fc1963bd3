"""With gather="forward" parameters are gathered during the next forward, and whoever needs them waits."""

from __future__ import annotations

import copy
import pickle
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks, wrap
from harness.models import MLP, TRANSFORMER, Case, mean_squared_error
from overlap import ZeroRedundancyOptimizer, ZeroStep, chain


def _slow_down_gathers(zero: ZeroRedundancyOptimizer) -> None:
    """So that a missing wait shows."""
    gather = zero.exchange.gather

    async def slow_gather(shards: Any, group: Any) -> None:
        time.sleep(0.01)
        await gather(shards, group)

    object.__setattr__(zero.exchange, "gather", slow_gather)


def _same_parameters(ours: nn.Module, theirs: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def _compared_with_plain_ddp(rank: int, world_size: int, case: Case, deferred: bool) -> dict[str, bool]:
    """Whether each reader of parameters saw those of plain DDP."""
    plain = wrap(case.model(), **case.ddp_options())
    reference = torch.optim.AdamW(plain.parameters(), lr=0.01)
    ddp = wrap(case.model(), **case.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=True)
    registration = chain(ZeroStep(zero, gather="forward", deferred=deferred)).register(ddp)
    _slow_down_gathers(zero)
    saw = {"forward": True}
    for step in range(6):
        batch = case.batch(step, rank)
        plain.zero_grad()
        expected = mean_squared_error(plain, batch)
        expected.backward()
        reference.step()
        loss = mean_squared_error(ddp, batch)
        saw["forward"] &= torch.equal(loss, expected)
        loss.backward()
        zero.step()
        if step == 2:
            for model in (plain, ddp):
                model.eval()
            with torch.no_grad():
                saw["evaluation"] = torch.equal(mean_squared_error(ddp, batch), mean_squared_error(plain, batch))
            for model in (plain, ddp):
                model.train()
        if step == 3:
            state = ddp.module.state_dict()
            saw["state_dict"] = all(torch.equal(state[key], v) for key, v in plain.module.state_dict().items())
        if step == 4:
            zero.wait()
            saw["wait"] = _same_parameters(ddp, plain)
    registration.remove()
    saw["remove"] = _same_parameters(ddp, plain)
    return saw


def _every_case(rank: int, world_size: int) -> None:
    for case in (MLP, TRANSFORMER):
        for deferred in (False, True):
            saw = _compared_with_plain_ddp(rank, world_size, case, deferred)
            assert all(saw.values()), (case, deferred, saw)


def test_readers_of_the_model_see_new_parameters() -> None:
    run_ranks(_every_case, 2)


def _a_gather_fails(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero, gather="forward")).register(ddp)
    good = zero.exchange.gather

    async def bad(shards: Any, group: Any) -> None:
        raise ValueError("lost")

    for step in range(5):
        if step == 2:
            zero.wait()
            object.__setattr__(zero.exchange, "gather", bad)
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        if step == 2:
            with pytest.raises(ValueError, match="lost"):
                zero.wait()
            object.__setattr__(zero.exchange, "gather", good)
        zero.step()


def test_wait_raises_the_error_of_a_gather_that_fails_and_training_goes_on() -> None:
    run_ranks(_a_gather_fails, 2)


def _trained(rank: int) -> DistributedDataParallel:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero, gather="forward")).register(ddp)
    for step in range(2):
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        zero.step()
    zero.wait()
    return ddp


def _deep_copied(rank: int, world_size: int) -> None:
    ddp = _trained(rank)
    inputs = MLP.batch(0, 0).inputs
    assert torch.equal(copy.deepcopy(ddp.module)(*inputs), ddp.module(*inputs))


def _pickled(rank: int, world_size: int) -> None:
    ddp = _trained(rank)
    inputs = MLP.batch(0, 0).inputs
    assert torch.equal(pickle.loads(pickle.dumps(ddp.module))(*inputs), ddp.module(*inputs))


def test_a_model_with_modules_that_wait_can_be_copied_deeply() -> None:
    run_ranks(_deep_copied, 2)


def test_a_model_with_modules_that_wait_can_be_pickled() -> None:
    run_ranks(_pickled, 2)
