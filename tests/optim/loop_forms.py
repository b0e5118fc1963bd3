"""Forms of update with which a loop is run beside plain DDP."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from harness.models import MLP
from overlap import AllReduce, OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep, chain

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def registered(form: str, ddp: Any) -> Any:
    """The optimizer that the loop holds, with its stage registered; ``form`` is such as ``zero deferred``."""
    deferred = "deferred" in form
    if form.startswith("zero"):
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, **SGD.keywords)
        chain(ZeroStep(zero, deferred=deferred)).register(ddp)
        return zero
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), Step(optimizer, deferred=deferred)).register(ddp)
    return optimizer


def settle(optimizer: Any) -> None:
    """Wait for gathers, before parameters are read."""
    if hasattr(optimizer, "wait"):
        optimizer.wait()


def backward(model: nn.Module, step: int, rank: int) -> None:
    """The backward of one batch."""
    model(*MLP.batch(step, rank).inputs).square().mean().backward()
