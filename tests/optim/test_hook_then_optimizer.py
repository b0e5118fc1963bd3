"""`hook_then_optimizer` as PyTorch has it: the optimizer is plain or functional, and nobody calls `step()`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from step_loops import SGD, NoScheduler, plain_ddp

from harness import assert_parity, run_ranks, train, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    OptimizerHookState,
    Step,
    TrainingLoopError,
    allreduce_hook,
    chain,
    hook_then_optimizer,
    register,
)
from overlap.optim import FunctionalSGD

Parameters = list[dict[str, torch.Tensor]]


def _reference(rank: int) -> Parameters:
    records = train(*plain_ddp(MLP, SGD), MLP.batches(rank, steps=6), scheduler=NoScheduler)
    return [record.parameters for record in records]


def _trained_by_backward_alone(rank: int, ddp: Any) -> Parameters:
    parameters = []
    for batch in MLP.batches(rank, steps=6):
        ddp.zero_grad()
        mean_squared_error(ddp, batch).backward()
        parameters.append({name: p.detach().clone() for name, p in ddp.module.named_parameters()})
    return parameters


def _with_ddp_itself(rank: int, world_size: int, make: Any) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, OptimizerHookState(make(ddp.parameters()))))
    assert_parity(_trained_by_backward_alone(rank, ddp), _reference(rank), what="registered with DDP itself")


@pytest.mark.parametrize(
    "make", [SGD, functools.partial(FunctionalSGD, lr=0.1, momentum=0.9)], ids=["SGD", "FunctionalSGD"]
)
def test_the_hook_updates_when_registered_with_ddp_itself(make: Any) -> None:
    run_ranks(_with_ddp_itself, 2, make)


def _without_parameters(rank: int, world_size: int, with_ddp_itself: bool) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    functional = FunctionalSGD([], lr=0.1, momentum=0.9, _allow_empty_param_list=True)
    hook = hook_then_optimizer(allreduce_hook, OptimizerHookState(functional))
    if with_ddp_itself:
        ddp.register_comm_hook(None, hook)
    else:
        register(ddp, hook)
    candidate = _trained_by_backward_alone(rank, ddp)
    assert_parity(candidate, _reference(rank), what="a functional optimizer without parameters at first")


@pytest.mark.parametrize("with_ddp_itself", [False, True], ids=["register", "register_comm_hook"])
def test_a_functional_optimizer_without_parameters_takes_those_that_come(with_ddp_itself: bool) -> None:
    run_ranks(_without_parameters, 2, with_ddp_itself)


def _parameter_in_no_bucket(rank: int, world_size: int, with_ddp_itself: bool) -> None:
    ddp, head = wrap(MLP.model(), **MLP.ddp_options()), torch.nn.Linear(16, 1)
    optimizer = SGD(ddp.parameters())
    if with_ddp_itself:
        ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, OptimizerHookState(optimizer)))
    else:
        chain(AllReduce(), Step(optimizer)).register(ddp)
    optimizer.add_param_group({"params": head.parameters()})
    with pytest.raises(TrainingLoopError, match="2 parameters of the SGD have gradients but are in no bucket"):
        head(ddp(*MLP.batch(0, rank).inputs)).sum().backward()


@pytest.mark.parametrize("with_ddp_itself", [False, True], ids=["register", "register_comm_hook"])
def test_a_parameter_that_backward_would_never_update_is_an_error(with_ddp_itself: bool) -> None:
    run_ranks(_parameter_in_no_bucket, 2, with_ddp_itself)
