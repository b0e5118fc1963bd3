"""The two ways to train that the demo compares: what is registered with DDP, and what the loop steps.

Another way to send gradients is two lines in `_reducer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap import chain
from overlap.demo.settings import Settings
from overlap.hooks import AllReduce, Cast, PowerSGD, Quantize, Stage
from overlap.hooks.wires import BFloat16, Float8, Float16, Int4, Int8, TopK, Wire
from overlap.optim import LocalSGD, OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep

__all__ = ["Recipe", "overlapped", "plain"]

# What PowerSGD leaves out of a gradient comes some steps later, and momentum multiplies it then: see
# docs/notes/powersgd-early-loss.md. Without momentum a step is a tenth as long at the same rate.
_WITHOUT_MOMENTUM = {"lr": 0.1, "momentum": 0.0}


_WIRES: dict[str, Wire] = {
    "fp16": Float16(),
    "bf16": BFloat16(),
    "fp8": Float8(),
    "int8": Int8(),
    "int4": Int4(),
    "topk": TopK(0.01),
}


@dataclass(frozen=True)
class Recipe:
    """How one of the two runs trains."""

    # What happens to a bucket: in words, or the chain's repr.
    description: str
    # What the training loop steps and the learning rate's schedule changes.
    optimizer: Optimizer
    # The result is the plain run's, bit for bit.
    exact: bool
    # The loop must clear the gradients; a registered chain does it by itself.
    zero_grad: bool
    # What is left to do when training is over, on every rank.
    finish: Callable[[], None] = lambda: None


def plain(ddp: DistributedDataParallel, settings: Settings) -> Recipe:
    """DDP reduces the gradients in its backward, then the optimizer steps."""
    optimizer = _optimizer(ddp.parameters(), settings)
    return Recipe("DDP, then the optimizer's step", optimizer, exact=True, zero_grad=True)


def overlapped(ddp: DistributedDataParallel, settings: Settings) -> Recipe:
    """The chain that the options ask for: a reducer, then an update."""
    reducer = _reducer(settings)
    if settings.local_sgd is not None:
        return _local_sgd(ddp, settings, settings.local_sgd, reducer)
    kind, options = _kind(settings)
    description = ""
    if settings.powersgd is not None and settings.optimizer == "sgd":
        options |= _WITHOUT_MOMENTUM
        description = f", without momentum, learning rate {options['lr']}"
    update: Stage
    optimizer: Optimizer
    if settings.zero:
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), kind, overlap_with_ddp=True, **options)
        update = ZeroStep(optimizer, **_sharded_wires(settings))
    else:
        optimizer = OverlappedOptimizer(kind(ddp.parameters(), **options))
        update = Step(optimizer)
    # The sharded update reduces by itself, and sends less than behind an all-reduce.
    stages = chain(update) if settings.zero and reducer is None else chain(reducer or AllReduce(), update)
    stages.register(ddp)
    is_exact = reducer is None and settings.wire is None
    return Recipe(repr(stages) + description, optimizer, exact=is_exact, zero_grad=False)


def _reducer(settings: Settings) -> Stage | None:
    """The way to send gradients that was asked for, if any; none of them gives exactly the plain run's result."""
    if settings.bf16_gradients:
        return Cast(torch.bfloat16, AllReduce())
    if settings.powersgd is not None:
        return PowerSGD(rank=settings.powersgd)
    if settings.wire is not None and not settings.zero and settings.local_sgd is None:
        return Quantize(_WIRES[settings.wire], error_feedback=_leaves_out_much(settings.wire))
    return None


def _sharded_wires(settings: Settings) -> dict[str, Any]:
    """Gradients as asked; parameters in no less than 8 bits, and sparse changes of them not at all."""
    if settings.wire is None:
        return {}
    gather = Int8() if settings.wire in ("int4", "topk") else _WIRES[settings.wire]
    return {
        "reduce_wire": _WIRES[settings.wire],
        "gather_wire": gather,
        "error_feedback": _leaves_out_much(settings.wire),
    }


def _leaves_out_much(wire: str) -> bool:
    """Whether what a step leaves out is too much to be lost."""
    return wire in ("int4", "topk")


def _local_sgd(ddp: DistributedDataParallel, settings: Settings, period: int, reducer: Stage | None) -> Recipe:
    steps_per_epoch = settings.steps_per_epoch(ddp.process_group.size())
    optimizer = _optimizer(ddp.parameters(), settings)
    options: dict[str, Any] = {}
    if settings.wire is not None:
        options = {"wire": _WIRES[settings.wire], "error_feedback": _leaves_out_much(settings.wire)}
    if settings.diloco:
        # DiLoCo's momentum of 0.9 is for hundreds of rounds; in the dozen of 5 epochs it overshoots.
        options["outer"] = lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.5, nesterov=True)
    local = LocalSGD(ddp, optimizer, period, start_step=steps_per_epoch, reducer=reducer, **options)
    return Recipe(repr(local), local, exact=False, zero_grad=True, finish=local.synchronize)


def _optimizer(parameters: Iterable[Parameter], settings: Settings) -> Optimizer:
    kind, options = _kind(settings)
    return kind(parameters, **options)


def _kind(settings: Settings) -> tuple[type[Optimizer], dict[str, Any]]:
    """The optimizer and its options; the rate is the highest of the schedule."""
    if settings.optimizer == "adamw":
        return torch.optim.AdamW, {"lr": 2e-3, "weight_decay": 1e-2, "fused": True}
    return torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 5e-4, "fused": True}
