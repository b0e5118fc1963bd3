"""Calls in an order that loses or repeats an update are errors, and the loop can go on after them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from step_loops import backward, registered

from harness import on_ranks, wrap
from harness.models import MLP
from overlap import TrainingLoopError


def _form(form: str) -> tuple[Any, Any]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    return ddp, registered(form, ddp)


def _unreduced(rank: int, world_size: int, form: str) -> None:
    def loss(model: Any) -> torch.Tensor:
        total: torch.Tensor = model(*MLP.batch(1, rank).inputs).square().sum()
        return total

    ddp, optimizer = _form(form)
    loss(ddp.module).backward()
    with pytest.raises(TrainingLoopError, match=r"not reduced over ranks .*call ddp\(x\), not model\(x\)"):
        optimizer.step()
    ddp.zero_grad()
    with ddp.no_sync():
        loss(ddp).backward()
    with pytest.raises(TrainingLoopError, match=r"not reduced over ranks .*outside of ddp.no_sync\(\)"):
        optimizer.step()
    ddp.zero_grad()
    # Gradients that the loop computes by itself, and the way that the message names for them.
    parameters = list(ddp.parameters())
    gradients = torch.autograd.grad(loss(ddp), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    with pytest.raises(TrainingLoopError, match=r"without inputs.*torch.autograd.backward\(list\(ddp.parameters"):
        optimizer.step()
    ddp.zero_grad()
    before = [parameter.detach().clone() for parameter in parameters]
    torch.autograd.backward(parameters, gradients)
    optimizer.step()
    for parameter, old, gradient in zip(parameters, before, gradients, strict=True):
        dist.all_reduce(gradient)
        torch.testing.assert_close(parameter.detach(), old - 0.1 * (gradient / world_size + 0.01 * old))


@on_ranks(2)
def test_a_step_on_gradients_that_were_not_reduced_is_an_error_that_names_the_cause(rank: int, world_size: int) -> None:
    for form in ("interleaved", "deferred", "zero", "zero deferred"):
        _unreduced(rank, world_size, form)


@on_ranks(2)
def test_parameters_that_a_backward_misses_or_ddp_does_not_reduce_are_named_by_step(rank: int, world_size: int) -> None:
    ddp, optimizer = _form("interleaved")
    for step in range(3):
        backward(ddp, step, rank)
        optimizer.step()
    ddp(*MLP.batch(3, rank).inputs)
    ddp.module[4:](torch.ones(1, 16)).sum().backward()  # The first layers take no part.
    with pytest.raises(TrainingLoopError, match=r"not reached every parameter.*0\.weight.*find_unused_parameters"):
        optimizer.step()
    model = MLP.model()
    model[0].requires_grad_(False)
    ddp = wrap(model, **MLP.ddp_options())
    optimizer = registered("interleaved", ddp)
    ddp.module[0].requires_grad_(True)  # DDP does not reduce it, so the ranks would part here.
    backward(ddp, 0, rank)
    with pytest.raises(TrainingLoopError, match=r"not reduced over ranks \(0\.weight \(and 1 other\)\)"):
        optimizer.step()
