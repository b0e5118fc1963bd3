"""Every form of update with which a loop is run beside plain DDP."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from harness import wrap
from harness.models import MLP
from overlap import AllReduce, OverlappedOptimizer, Step, TrainingLoopError, ZeroRedundancyOptimizer, ZeroStep, chain

INTERLEAVED = ("interleaved", "zero", "zero in forward")
FORMS = (*INTERLEAVED, "deferred", "clipped", "zero deferred")
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
CLIP = 0.02

Loop = Callable[[Any, Any, int], None]


class Clipped(torch.optim.SGD):
    """The plain counterpart of ``clip_grad_norm=CLIP``."""

    def step(self, closure: Any = None) -> None:
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], CLIP)
        super().step()


def plain(form: str, parameters: Any) -> torch.optim.Optimizer:
    """What plain DDP is trained with beside ``form``."""
    return (Clipped if form == "clipped" else torch.optim.SGD)(parameters, **SGD.keywords)


def registered(form: str, ddp: Any) -> Any:
    """The optimizer that the loop holds, with its stage registered."""
    if form.startswith("zero"):
        zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, **SGD.keywords)
        gather = "forward" if form == "zero in forward" else "backward"
        chain(ZeroStep(zero, deferred=form == "zero deferred", gather=gather)).register(ddp)
        return zero
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    options = {"clip_grad_norm": CLIP} if form == "clipped" else {"deferred": form == "deferred"}
    chain(AllReduce(), Step(optimizer, **options)).register(ddp)
    return optimizer


def skipping(optimizer: Any) -> AbstractContextManager[None]:
    """``optimizer.skip_update()``, which a plain optimizer does not need."""
    return optimizer.skip_update() if hasattr(optimizer, "skip_update") else contextlib.nullcontext()


def settle(*optimizers: Any) -> None:
    """Wait for gathers, before parameters are read."""
    for optimizer in optimizers:
        if hasattr(optimizer, "wait"):
            optimizer.wait()


def backward(model: nn.Module, step: int, rank: int) -> None:
    """The backward of one batch."""
    model(*MLP.batch(step, rank).inputs).square().mean().backward()


def check_refused(form: str, loop: Loop, rank: int, pattern: str, **ddp_options: Any) -> None:
    """``loop`` ends in a TrainingLoopError, and afterwards the model trains on."""
    import pytest

    ddp = wrap(MLP.model(), **{**MLP.ddp_options(), **ddp_options})
    optimizer = registered(form, ddp)
    with pytest.raises(TrainingLoopError, match=pattern):
        loop(ddp, optimizer, rank)
    for step in range(2):
        for _ in range(3):  # An error is told once, but a loop may have made several.
            with contextlib.suppress(TrainingLoopError):
                optimizer.step()
        backward(ddp, step, rank)
        optimizer.step()
    settle(optimizer)
    gathered = [torch.empty_like(p) for p in (next(ddp.parameters()),) for _ in range(2)]
    torch.distributed.all_gather(gathered, next(ddp.parameters()).detach())
    assert torch.equal(*gathered)
