"""Weights that something else reads or changes: averages, pruning, parametrizations."""

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from .corpus import limit, loop, variant
from .forms import IN_BACKWARD
from .models import batch_norm, mlp
from .plain import touched, trained, usual
from .run import Run

ALREADY_NEW = limit(IN_BACKWARD, "after backward they are the new ones already")


def _with(change: Any) -> Any:
    """A model whose first two layers ``change`` was called with."""

    def build() -> nn.Module:
        model = mlp()
        with warnings.catch_warnings(action="ignore"):  # Of the old styles.
            for place in (0, 2):
                change(model[place])
        return model

    return build


class Hooked(nn.Sequential):
    """A pre-hook of the user's reads the weight of the next layer."""

    def __init__(self) -> None:
        super().__init__(*mlp())
        self[2].register_forward_pre_hook(lambda module, args: (args[0] * (1 + module.weight.mean()),))


variant(usual, "weight_norm, old style", model=_with(nn.utils.weight_norm))
variant(usual, "spectral_norm, old style", model=_with(nn.utils.spectral_norm))
variant(usual, "weight_norm, parametrization", model=_with(parametrizations.weight_norm))
variant(usual, "pruning before DDP", model=_with(partial(prune.l1_unstructured, name="weight", amount=0.3)))
variant(usual, "a forward pre-hook that reads weights", model=Hooked)


@loop("pruning in mid-run, by masks")
def masks(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for loss in usual(ddp, optimizer, run):
        run.settle(optimizer)
        with torch.no_grad():
            for layer in (ddp.module[0], ddp.module[2]):
                layer.weight.mul_(layer.weight.abs() > 0.05)
        yield loss


@loop("SWA with SWALR and update_bn", model=batch_norm)
def swa(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    average, scheduler = AveragedModel(ddp.module), SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    for loss in usual(ddp, optimizer, run):
        scheduler.step()
        run.settle(optimizer)
        average.update_parameters(ddp.module)
        yield loss
    update_bn([x for x, _ in run.batches(2)], average)
    yield list(average.parameters()), list(average.buffers())


@loop("EMA in a step post-hook of the optimizer")
def ema_hook(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    average = [parameter.detach().clone() for parameter in ddp.parameters()]

    def update(*_: Any) -> None:
        run.settle(optimizer)
        with torch.no_grad():
            for mean, parameter in zip(average, ddp.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)

    optimizer.register_step_post_hook(update)
    for loss in usual(ddp, optimizer, run):
        yield loss, average


@loop("EMA of the model after step(), with its buffers", model=batch_norm)
def ema_of_model(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    average = copy.deepcopy(ddp.module).eval()
    for x, y in run.batches():
        loss = trained(ddp, optimizer, x, y)
        run.settle(optimizer)
        with torch.no_grad():
            for mean, value in zip(average.state_dict().values(), ddp.module.state_dict().values(), strict=True):
                mean.copy_(0.9 * mean + 0.1 * value)
            yield loss, average(x)


@loop("a teacher written by .data after step(), its center summed over ranks")
def distilled(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    teacher, center = copy.deepcopy(ddp.module).requires_grad_(False), torch.zeros(16)
    for x, _ in run.batches():
        optimizer.zero_grad()
        target = teacher(x)
        loss = cross_entropy(ddp(x), (target - center).softmax(dim=1))
        batch = target.mean(dim=0)
        dist.all_reduce(batch)
        center = 0.9 * center + 0.1 * batch / dist.get_world_size()
        loss.backward()
        optimizer.step()
        run.settle(optimizer)
        for student, parameter in zip(ddp.module.parameters(), teacher.parameters(), strict=True):
            parameter.data.mul_(0.9).add_(0.1 * student.detach().data)
        yield loss, center, list(teacher.parameters())


def _edit(run: Run, ddp: Any, optimizer: Any) -> None:
    run.settle(optimizer)
    for parameter in ddp.parameters():
        parameter.data.mul_(0.99)


def _read(run: Run, ddp: Any, optimizer: Any) -> Any:
    run.settle(optimizer)
    return [parameter.detach().clone() for parameter in ddp.parameters()]


variant(touched(before_forward=_edit), "weights edited before the forward, through .data")
variant(touched(before_step=_read), "weights read between backward and step()", ALREADY_NEW)


@loop("parameters_to_vector and back")
def vectors(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for loss in usual(ddp, optimizer, run):
        run.settle(optimizer)
        vector = parameters_to_vector(ddp.parameters()).detach()
        vector_to_parameters(vector * 0.99, ddp.parameters())
        yield loss, vector


@loop("a deep copy of the model for evaluation", model=batch_norm)
def copies(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for x, y in run.batches():
        loss = trained(ddp, optimizer, x, y)
        run.settle(optimizer)
        copied = copy.deepcopy(ddp.module).eval()
        with torch.no_grad():
            yield loss, copied(x)


@loop("the best weights put back: model.load_state_dict() in mid-run", steps=3)
def rolls_back(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    best = copy.deepcopy(ddp.module.state_dict())
    for place, loss in enumerate(usual(ddp, optimizer, run)):
        if place == 1:
            ddp.module.load_state_dict(best)
        yield loss
