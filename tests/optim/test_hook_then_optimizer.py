"""`hook_then_optimizer` as PyTorch has it: the optimizer is plain or functional, and nobody calls `step()`."""

import functools
from typing import Any

import torch
from step_loops import SGD, NoScheduler, plain_ddp

from harness import assert_parity, on_ranks, train, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    OptimizerHookState,
    allreduce_hook,
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


@on_ranks(2)
def test_a_functional_optimizer_updates_in_backward_also_parameters_that_come(rank: int, world_size: int) -> None:
    functional = functools.partial(FunctionalSGD, **SGD.keywords)
    reference = _reference(rank)
    for is_late in (False, True):
        for with_ddp_itself in (False, True):
            ddp = wrap(MLP.model(), **MLP.ddp_options())
            made = functional([], _allow_empty_param_list=True) if is_late else functional(ddp.parameters())
            hook = hook_then_optimizer(allreduce_hook, OptimizerHookState(made))
            if with_ddp_itself:
                ddp.register_comm_hook(None, hook)
            else:
                register(ddp, hook)
            candidate = _trained_by_backward_alone(rank, ddp)
            assert_parity(candidate, reference, what=f"without parameters at first: {is_late}, {with_ddp_itself=}")
