"""The methods of training that are compared. To add one, write its function and its line in `contestants`.

All have the same model, data, optimizer, learning rate and schedule: nothing is tuned for any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap import (
    AllReduce,
    Cast,
    Int4,
    Int8,
    LocalSGD,
    OverlappedOptimizer,
    PowerSGD,
    Quantize,
    Stage,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)

__all__ = ["BASELINE", "LOCAL_PERIOD", "Contestant", "Entrant", "OptimizerKind", "contestants"]

# What every ratio is taken to.
BASELINE = "ddp"
# Local SGD averages so often, after as many steps of plain DDP as two rounds have.
LOCAL_PERIOD = 8


@dataclass(frozen=True)
class OptimizerKind:
    """A class of optimizers and its options."""

    cls: type[Optimizer]
    options: dict[str, Any]

    def make(self, ddp: DistributedDataParallel) -> Optimizer:
        return self.cls(ddp.parameters(), **self.options)


@dataclass(frozen=True)
class Entrant:
    """A contestant on one rank, ready for its first step."""

    # What the training loop steps and the schedule changes.
    optimizer: Optimizer
    # The loop must clear the gradients; a registered chain does it by itself.
    zero_grad: bool
    # Waits for what steps have left in flight.
    settle: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Contestant:
    """A way to train: what it is, for a reader, and how it is set up on a model."""

    description: str
    enter: Callable[[DistributedDataParallel, OptimizerKind], Entrant]


@cache
def contestants() -> dict[str, Contestant]:
    """Every contestant by name, in the order of the table."""
    return {
        BASELINE: Contestant("DDP, then optimizer.step()", _plain),
        "torch-fp16": Contestant("DDP with PyTorch's fp16_compress_hook, then optimizer.step()", _torch_fp16),
        "overlap-step": Contestant("chain(AllReduce(), Step(optim))", _chain(AllReduce)),
        "overlap-fp16": Contestant(
            "chain(Cast(torch.float16, AllReduce()), Step(optim))", _chain(lambda: Cast(torch.float16, AllReduce()))
        ),
        "overlap-int8": Contestant("chain(Quantize(Int8()), Step(optim))", _chain(lambda: Quantize(Int8()))),
        "overlap-int4": Contestant(
            "chain(Quantize(Int4(), error_feedback=True), Step(optim))",
            _chain(lambda: Quantize(Int4(), error_feedback=True)),
        ),
        "overlap-powersgd-r4": Contestant("chain(PowerSGD(rank=4), Step(optim))", _chain(lambda: PowerSGD(rank=4))),
        "overlap-zero": Contestant("chain(ZeroStep(zero))", _zero("backward")),
        "overlap-zero-gather-forward": Contestant('chain(ZeroStep(zero, gather="forward"))', _zero("forward")),
        "overlap-local-sgd": Contestant(
            f"LocalSGD(ddp, optimizer, period={LOCAL_PERIOD}, start_step={2 * LOCAL_PERIOD})", _local_sgd
        ),
    }


def _plain(ddp: DistributedDataParallel, kind: OptimizerKind) -> Entrant:
    return Entrant(kind.make(ddp), zero_grad=True)


def _torch_fp16(ddp: DistributedDataParallel, kind: OptimizerKind) -> Entrant:
    ddp.register_comm_hook(ddp.process_group, default_hooks.fp16_compress_hook)
    return Entrant(kind.make(ddp), zero_grad=True)


def _chain(reducer: Callable[[], Stage]) -> Callable[[DistributedDataParallel, OptimizerKind], Entrant]:
    def enter(ddp: DistributedDataParallel, kind: OptimizerKind) -> Entrant:
        optimizer = OverlappedOptimizer(kind.make(ddp))
        chain(reducer(), Step(optimizer)).register(ddp)
        return Entrant(optimizer, zero_grad=False)

    return enter


def _zero(gather: Any) -> Callable[[DistributedDataParallel, OptimizerKind], Entrant]:
    def enter(ddp: DistributedDataParallel, kind: OptimizerKind) -> Entrant:
        zero = ZeroRedundancyOptimizer(ddp.parameters(), kind.cls, overlap_with_ddp=True, **kind.options)
        chain(ZeroStep(zero, gather=gather)).register(ddp)
        return Entrant(zero, zero_grad=False, settle=zero.wait)

    return enter


def _local_sgd(ddp: DistributedDataParallel, kind: OptimizerKind) -> Entrant:
    local = LocalSGD(ddp, kind.make(ddp), period=LOCAL_PERIOD, start_step=2 * LOCAL_PERIOD)
    return Entrant(local, zero_grad=True)
