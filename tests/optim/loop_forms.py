"""Forms of update with which a loop is run beside plain DDP."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from harness.models import MLP
from overlap import AllReduce, OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep, chain

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def registered(form: str, ddp: Any, make: Any = SGD, **options: Any) -> Any:
    """What the loop holds, its stage registered. ``form`` is such as ``zero deferred``, ``automatic``, ``released``,
    ``zero in forward``, ``zero by parameter`` or ``zero behind a reducer``; ``options`` are the stage's."""
    options = {"deferred": "deferred" in form, "release_gradients": "released" in form, **options}
    if form.startswith("zero"):
        partition = "parameter" if "by parameter" in form else None
        zero = ZeroRedundancyOptimizer(ddp.parameters(), make.func, partition=partition, **make.keywords)
        before = [AllReduce()] if "behind a reducer" in form else []
        gather = "forward" if "in forward" in form else "backward"
        chain(*before, ZeroStep(zero, gather=gather, automatic="automatic" in form, **options)).register(ddp)
        return zero
    plain = make(ddp.parameters())
    optimizer = plain if "automatic" in form else OverlappedOptimizer(plain)
    chain(AllReduce(), Step(optimizer, **options)).register(ddp)
    return optimizer


def settle(optimizer: Any) -> None:
    """Wait for gathers, before parameters are read."""
    if hasattr(optimizer, "wait"):
        optimizer.wait()


def backward(model: nn.Module, step: int, rank: int) -> None:
    """The backward of one batch."""
    model(*MLP.batch(step, rank).inputs).square().mean().backward()
