"""The two ways to train that the demo compares: what is registered with DDP, and what the loop steps.

A recipe for another stage is a function like the ones below and a line in `overlapped`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap import chain
from overlap.demo.settings import Settings
from overlap.hooks import AllReduce, Cast
from overlap.optim import LocalSGD, OverlappedOptimizer, Step

__all__ = ["Recipe", "learning_rate", "overlapped", "plain"]


def _nothing() -> None:
    """For a recipe that leaves nothing to do."""


@dataclass(frozen=True)
class Recipe:
    """How one of the two runs trains."""

    # What happens to a bucket, in words or as the chain prints itself.
    plan: str
    # What the training loop steps and the learning rate's schedule changes.
    optimizer: Optimizer
    # The result is the plain run's, bit for bit.
    exact: bool
    # The loop must clear the gradients; a registered chain does it by itself.
    zero_grad: bool
    # What is left to do when training is over, on every rank.
    finish: Callable[[], None] = _nothing


def plain(ddp: DistributedDataParallel, settings: Settings) -> Recipe:
    """DDP reduces the gradients in its backward, then the optimizer steps."""
    optimizer = _optimizer(ddp.parameters(), settings)
    return Recipe("DDP, then the optimizer's step", optimizer, exact=True, zero_grad=True)


def overlapped(ddp: DistributedDataParallel, settings: Settings) -> Recipe:
    """The chain that the options ask for."""
    if settings.local_sgd is not None:
        return _local_sgd(ddp, settings, settings.local_sgd)
    if settings.bf16_gradients:
        return _bf16_gradients(ddp, settings)
    return _update_in_backward(ddp, settings)


def learning_rate(settings: Settings) -> float:
    """The highest of the schedule."""
    return {"sgd": 0.02, "adamw": 2e-3}[settings.optimizer]


def _update_in_backward(ddp: DistributedDataParallel, settings: Settings) -> Recipe:
    optimizer = OverlappedOptimizer(_optimizer(ddp.parameters(), settings))
    stages = chain(AllReduce(), Step(optimizer))
    stages.register(ddp)
    return Recipe(repr(stages), optimizer, exact=True, zero_grad=False)


def _bf16_gradients(ddp: DistributedDataParallel, settings: Settings) -> Recipe:
    optimizer = OverlappedOptimizer(_optimizer(ddp.parameters(), settings))
    stages = chain(Cast(torch.bfloat16, AllReduce()), Step(optimizer))
    stages.register(ddp)
    return Recipe(repr(stages), optimizer, exact=False, zero_grad=False)


def _local_sgd(ddp: DistributedDataParallel, settings: Settings, period: int) -> Recipe:
    steps_per_epoch = settings.steps_per_epoch(ddp.process_group.size())
    reducer = Cast(torch.bfloat16, AllReduce()) if settings.bf16_gradients else None
    optimizer = _optimizer(ddp.parameters(), settings)
    local = LocalSGD(ddp, optimizer, period, start_step=steps_per_epoch, reducer=reducer)
    return Recipe(repr(local), local, exact=False, zero_grad=True, finish=local.synchronize)


def _optimizer(parameters: Iterable[Parameter], settings: Settings) -> Optimizer:
    rate = learning_rate(settings)
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=1e-2, fused=True)
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=5e-4, fused=True)
