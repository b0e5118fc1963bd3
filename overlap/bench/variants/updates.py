"""The update in backward, and the update sharded among the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from overlap import AllReduce, Int4, Int8, OverlappedOptimizer, Stage, Step, ZeroRedundancyOptimizer, ZeroStep, chain
from overlap.bench.training_setup import LEARNING_RATE, TrainingLoop, TrainingSetup
from overlap.bench.variant import variant


@variant("torch-hook-then-optimizer-adamw", optimizer="adamw")
def torch_hook_then_optimizer_adamw(setup: TrainingSetup) -> TrainingLoop:
    from torch.distributed.algorithms.ddp_comm_hooks import optimizer_overlap_hooks as hooks
    from torch.distributed.optim import as_functional_optim

    ddp = setup.ddp()
    functional = as_functional_optim(torch.optim.AdamW, lr=LEARNING_RATE)
    state = hooks._OptimizerHookState(functional)
    ddp.register_comm_hook(setup.group, hooks._hook_then_optimizer(default_hooks.allreduce_hook, state))

    def step() -> None:
        ddp.zero_grad()
        setup.loss(ddp).backward()

    return TrainingLoop(step=step)


@variant("overlap-step-adamw", optimizer="adamw-fused")
def overlap_step_adamw(setup: TrainingSetup) -> TrainingLoop:
    return update_in_backward(setup, AllReduce())


@variant("overlap-step-adamw-deferred", optimizer="adamw-fused")
def overlap_step_adamw_deferred(setup: TrainingSetup) -> TrainingLoop:
    return update_in_backward(setup, AllReduce(), deferred=True)


def update_in_backward(setup: TrainingSetup, reducer: Stage, **options: Any) -> TrainingLoop:
    """One of our reducers, with the update in backward."""
    ddp = setup.ddp()
    overlapped = OverlappedOptimizer(setup.optimizer(ddp.parameters()))
    chain(reducer, Step(overlapped, **options)).register(ddp)

    def step() -> None:
        setup.loss(ddp).backward()
        overlapped.step()

    return TrainingLoop(step=step)


# The update sharded -----------------------------------------------------------------------------------------


@variant("torch-zero-sgd", optimizer="sgd")
def torch_zero_sgd(setup: TrainingSetup) -> TrainingLoop:
    return _torch_zero(setup, torch.optim.SGD, momentum=0.9)


@variant("torch-zero-adamw", optimizer="adamw")
def torch_zero_adamw(setup: TrainingSetup) -> TrainingLoop:
    return _torch_zero(setup, torch.optim.AdamW)


def _torch_zero(setup: TrainingSetup, kind: type[torch.optim.Optimizer], **options: Any) -> TrainingLoop:
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    ddp = setup.ddp()
    zero = TorchZero(ddp.parameters(), kind, process_group=setup.group, lr=LEARNING_RATE, **options)
    return setup.plain_loop(ddp, zero)


@variant("torch-zero-interleaved-adamw", optimizer="adamw", backends=("nccl",))
def torch_zero_interleaved_adamw(setup: TrainingSetup) -> TrainingLoop:
    from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step_interleaved
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    ddp = setup.ddp()
    zero = TorchZero(
        ddp.parameters(),
        torch.optim.AdamW,
        process_group=setup.group,
        lr=LEARNING_RATE,
        overlap_with_ddp=True,
    )
    ddp.register_comm_hook(None, hook_with_zero_step_interleaved(default_hooks.allreduce_hook, ddp, zero))
    return setup.plain_loop(ddp, zero)


@variant("overlap-zero-sgd", optimizer="sgd")
def overlap_zero_sgd(setup: TrainingSetup) -> TrainingLoop:
    return _overlapped_zero(setup, torch.optim.SGD, momentum=0.9)


# A step leaves its gathers to the next forward, so several steps in a row are timed.
@variant("overlap-zero-sgd-gather-forward", optimizer="sgd", floor="streamed", block_steps=4, lead_in_steps=1)
def overlap_zero_sgd_gather_forward(setup: TrainingSetup) -> TrainingLoop:
    return _overlapped_zero(setup, torch.optim.SGD, gather="forward", momentum=0.9)


@variant("overlap-zero-adamw", optimizer="adamw-fused")
def overlap_zero_adamw(setup: TrainingSetup) -> TrainingLoop:
    return _overlapped_zero(setup, torch.optim.AdamW, fused=True)


# A step leaves its gathers to the next forward, so several steps in a row are timed.
@variant("overlap-zero-adamw-gather-forward", optimizer="adamw-fused", floor="streamed", block_steps=4, lead_in_steps=1)
def overlap_zero_adamw_gather_forward(setup: TrainingSetup) -> TrainingLoop:
    return _overlapped_zero(setup, torch.optim.AdamW, gather="forward", fused=True)


_FEW_BITS: dict[str, Any] = {"reduce_wire": Int4(), "gather_wire": Int8(), "error_feedback": True}


@variant("overlap-zero-adamw-int4-int8", optimizer="adamw-fused")
def overlap_zero_adamw_int4_int8(setup: TrainingSetup) -> TrainingLoop:
    return _overlapped_zero(setup, torch.optim.AdamW, stage=_FEW_BITS, fused=True)


# A step leaves its gathers to the next forward, so several steps in a row are timed.
@variant(
    "overlap-zero-adamw-int4-int8-gather-forward", optimizer="adamw-fused", floor="streamed", block_steps=4,
    lead_in_steps=1,
)  # fmt: skip
def overlap_zero_adamw_int4_int8_gather_forward(setup: TrainingSetup) -> TrainingLoop:
    return _overlapped_zero(setup, torch.optim.AdamW, stage=_FEW_BITS, gather="forward", fused=True)


def _overlapped_zero(
    setup: TrainingSetup,
    kind: type[torch.optim.Optimizer],
    *,
    gather: str = "backward",
    stage: Mapping[str, Any] | None = None,
    **options: Any,
) -> TrainingLoop:
    ddp = setup.ddp()
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), kind, process_group=setup.group, overlap_with_ddp=True, lr=LEARNING_RATE, **options
    )
    chain(ZeroStep(zero, gather=gather, **(stage or {}))).register(ddp)

    def step() -> None:
        setup.loss(ddp).backward()
        zero.step()

    return TrainingLoop(step=step, finish=zero.wait)


# Two updates ------------------------------------------------------------------------------------------------


@variant("ddp-muon", baseline="ddp-muon", optimizer="adamw-fused")
def ddp_muon(setup: TrainingSetup) -> TrainingLoop:
    """Muon for matrices and AdamW for the rest, one after the other."""
    ddp = setup.ddp()
    muon, adamw = (kind(parameters, lr=LEARNING_RATE) for kind, parameters in _matrices_and_rest(ddp))

    def step() -> None:
        ddp.zero_grad()
        setup.loss(ddp).backward()
        muon.step()
        adamw.step()

    return TrainingLoop(step=step)


@variant("overlap-step-muon", baseline="ddp-muon", optimizer="adamw-fused")
def overlap_step_muon(setup: TrainingSetup) -> TrainingLoop:
    ddp = setup.ddp()
    both = [OverlappedOptimizer(kind(found, lr=LEARNING_RATE)) for kind, found in _matrices_and_rest(ddp)]
    chain(AllReduce(), *map(Step, both)).register(ddp)
    return _stepped(setup, ddp, both)


@variant("overlap-zero-muon", baseline="ddp-muon", optimizer="adamw-fused")
def overlap_zero_muon(setup: TrainingSetup) -> TrainingLoop:
    ddp = setup.ddp()
    both = [
        ZeroRedundancyOptimizer(found, kind, process_group=setup.group, overlap_with_ddp=True, lr=LEARNING_RATE)
        for kind, found in _matrices_and_rest(ddp)
    ]
    chain(*map(ZeroStep, both)).register(ddp)
    return _stepped(setup, ddp, both)


def _matrices_and_rest(ddp: torch.nn.Module) -> list[tuple[Any, list[torch.Tensor]]]:
    parameters: list[torch.Tensor] = list(ddp.parameters())
    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    rest = [parameter for parameter in parameters if parameter.ndim != 2]
    return [(torch.optim.Muon, matrices), (torch.optim.AdamW, rest)]


def _stepped(setup: TrainingSetup, ddp: torch.nn.Module, optimizers: Sequence[Any]) -> TrainingLoop:
    def step() -> None:
        setup.loss(ddp).backward()
        for optimizer in optimizers:
            optimizer.step()

    return TrainingLoop(step=step)
