"""Clipping by the global norm, and GradScaler."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from zero_loops import register

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import TrainingLoopError, ZeroRedundancyOptimizer, ZeroStep, chain


def _scaled_run(rank: int, make: Any, bad: tuple[int, int] | None, register: Any) -> tuple[Any, float]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = make(ddp.parameters())
    register(ddp, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    for step in range(7):
        loss = mean_squared_error(ddp, MLP.batch(step, rank))
        if bad == (step, rank):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            optimizer.wait()
        if not getattr(optimizer, "overlap_with_ddp", False):
            optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in ddp.module.named_parameters()}, scaler.get_scale()


def _scaled(rank: int, world_size: int, bad: tuple[int, int] | None) -> None:
    reference, scale = _scaled_run(rank, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), bad, lambda *_: None)
    for form in ({"deferred": True}, {"deferred": True, "gather": "forward"}, None):
        make = functools.partial(
            ZeroRedundancyOptimizer,
            optimizer_class=torch.optim.SGD,
            lr=0.1,
            momentum=0.9,
            overlap_with_ddp=form is not None,
        )
        candidate, our_scale = _scaled_run(rank, make, bad, functools.partial(register, form))
        assert_parity(candidate, reference, what=f"{form}, {bad=}")
        assert our_scale == scale


@pytest.mark.parametrize("bad", [(2, 0), (3, 1)], ids=["unscaled by step", "unscaled by the loop"])
def test_grad_scaler_skips_a_step_that_is_infinite_on_one_rank(bad: tuple[int, int]) -> None:
    run_ranks(_scaled, 2, bad)


def _one_rank_alone_is_not_finite(rank: int, world_size: int) -> float:
    """Only one element of one rank is not finite, and that in a chunk that the rank owns itself."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero, deferred=True)).register(ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    shard = next(s for s in zero.shards.values() if s.range[0] < s.range[1])
    before = shard.parameter.detach().clone()
    if rank == 1:

        def spoil(grad: torch.Tensor) -> torch.Tensor:
            spoilt = grad.clone()
            spoilt.view(-1)[shard.range[0]] = float("nan")
            return spoilt

        shard.parameter.register_hook(spoil)
    scaler.scale(mean_squared_error(ddp, MLP.batch(0, rank))).backward()
    scaler.step(zero)
    scaler.update()
    assert torch.equal(shard.parameter, before), "the step is skipped on every rank"
    return scaler.get_scale()


def test_a_rank_learns_of_a_gradient_that_is_not_finite_on_another() -> None:
    assert run_ranks(_one_rank_alone_is_not_finite, 3) == [2.0, 2.0, 2.0]


def _interleaved_scaler(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero)).register(ddp)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(mean_squared_error(ddp, MLP.batch(0, rank))).backward()
    with pytest.raises(TrainingLoopError, match="deferred=True"):
        scaler.step(zero)


def test_grad_scaler_needs_the_deferred_form() -> None:
    run_ranks(_interleaved_scaler, 2)
