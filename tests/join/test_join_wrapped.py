"""Wrapped optimizers and step hooks under Join: ranks without inputs make the same updates, hooks included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from join_loops import overlapped_body, plain_body, train_unevenly
from torch import nn

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP
from harness.third_party import DelegatingOptimizer
from overlap import AllReduce, ConfigurationError, Join, OverlappedOptimizer, Step, ZeroRedundancyOptimizer, chain
from overlap.optim import ZeroStep


class AcceleratedOptimizer(DelegatingOptimizer):
    """Has the class name by which Accelerate's is recognized."""


def _clamp(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.clamp_(-0.1, 0.1)


def _trained(rank: int, form: str, *, is_wrapped: bool) -> dict[str, Any]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    plain: Any = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    plain.register_step_post_hook(_clamp)
    optimizer = plain if form == "plain" else OverlappedOptimizer(plain)
    held = AcceleratedOptimizer(optimizer) if is_wrapped else optimizer
    if form != "plain":
        chain(AllReduce(), Step(held, deferred=form == "deferred")).register(ddp)
    return train_unevenly(ddp, held, MLP, rank, "forwards", body=plain_body if form == "plain" else overlapped_body)


def _sharded(rank: int, *, is_wrapped: bool) -> dict[str, Any]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero: Any = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    held = AcceleratedOptimizer(zero) if is_wrapped else zero
    chain(ZeroStep(held)).register(ddp)
    with Join([ddp, held]):
        for step in range(2 + rank):
            overlapped_body(ddp, held, MLP.batch(step, rank), 1.0)
    return {name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()}


def _hooks_and_wrappers(rank: int, world_size: int) -> None:
    reference = _trained(rank, "plain", is_wrapped=False)
    for form in ("plain", "interleaved", "deferred"):
        assert_parity(_trained(rank, form, is_wrapped=True), reference, what=f"{form}, wrapped, with a clamp")
    assert_parity(_sharded(rank, is_wrapped=True), _sharded(rank, is_wrapped=False), what="ZeRO, wrapped")


def test_wrapped_optimizers_and_post_hooks_do_the_same_on_ranks_without_inputs() -> None:
    run_ranks(_hooks_and_wrappers, 2)


def test_a_wrapper_whose_steps_a_join_would_not_see_is_refused() -> None:
    optimizer = DelegatingOptimizer(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(ConfigurationError, match="DelegatingOptimizer runs no step hooks"):
        Join([optimizer])
