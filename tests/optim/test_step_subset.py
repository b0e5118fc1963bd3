"""Updating some parameters in backward and leaving the rest: `Step(params=...)`, `OptimizerHookState(params=...)`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from step_loops import SGD, plain_ddp
from torch import nn

from harness import assert_parity, overlapped_step, run_ranks, train, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    ConfigurationError,
    OptimizerHookState,
    OverlappedOptimizer,
    Step,
    allreduce_hook,
    hook_then_optimizer,
    register,
)


def _rest_in_step(rank: int, world_size: int) -> None:
    batches = MLP.batches(rank, steps=6)
    ddp, optimizer = plain_ddp(MLP, SGD)
    reference = train(ddp, optimizer, batches, gradients=True)
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    overlapped = OverlappedOptimizer(SGD(ddp.parameters()))
    state = OptimizerHookState(overlapped, params=list(ddp.parameters())[:3])
    register(ddp, hook_then_optimizer(allreduce_hook, state))
    candidate = train(ddp, overlapped, batches, step_fn=overlapped_step, gradients=True)
    assert_parity(candidate, reference, what="a subset in backward, the rest in step()")


def test_an_overlapped_optimizer_updates_the_rest_in_step() -> None:
    run_ranks(_rest_in_step, 2)


def _ddp_with_three_in_backward() -> tuple[Any, list[nn.Parameter]]:
    """The model, whose first three parameters a plain optimizer updates in backward, and its other parameters."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    in_backward, rest = list(ddp.parameters())[:3], list(ddp.parameters())[3:]
    register(ddp, hook_then_optimizer(allreduce_hook, OptimizerHookState(SGD(in_backward), params=in_backward)))
    return ddp, rest


def _rest_averaged(rank: int, world_size: int) -> None:
    batch = MLP.batch(0, rank)
    reference, _ = plain_ddp(MLP, SGD)
    mean_squared_error(reference, batch).backward()
    ddp, _ = _ddp_with_three_in_backward()
    mean_squared_error(ddp, batch).backward()
    candidate, expected = (
        {name: parameter.grad.clone() for name, parameter in model.module.named_parameters()}
        for model in (ddp, reference)
    )
    assert_parity(candidate, expected, what="averaged gradients of all")


def test_with_a_plain_optimizer_all_keep_their_averaged_gradients() -> None:
    run_ranks(_rest_averaged, 2)


def test_params_must_not_be_empty() -> None:
    with pytest.raises(ConfigurationError, match="params is empty"):
        Step(SGD(nn.Linear(2, 2).parameters()), params=[])


def test_params_must_be_the_optimizers() -> None:
    with pytest.raises(ConfigurationError, match="does not have"):
        Step(SGD(nn.Linear(2, 2).parameters()), params=[nn.Parameter(torch.ones(1))])
