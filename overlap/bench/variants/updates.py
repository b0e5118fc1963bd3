"""The update in backward, and the update sharded among the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from overlap import AllReduce, OverlappedOptimizer, Stage, Step, ZeroRedundancyOptimizer, ZeroStep, chain
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


def update_in_backward(setup: TrainingSetup, reducer: Stage) -> TrainingLoop:
    """One of our reducers, with the update in backward."""
    ddp = setup.ddp()
    overlapped = OverlappedOptimizer(setup.optimizer(ddp.parameters()))
    chain(reducer, Step(overlapped)).register(ddp)

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


def _overlapped_zero(
    setup: TrainingSetup, kind: type[torch.optim.Optimizer], *, gather: str = "backward", **options: Any
) -> TrainingLoop:
    ddp = setup.ddp()
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), kind, process_group=setup.group, overlap_with_ddp=True, lr=LEARNING_RATE, **options
    )
    chain(ZeroStep(zero, gather=gather)).register(ddp)

    def step() -> None:
        setup.loss(ddp).backward()
        zero.step()

    return TrainingLoop(step=step, finish=zero.wait)
