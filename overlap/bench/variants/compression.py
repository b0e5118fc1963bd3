"""Gradients in fewer bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from overlap import AllReduce, Cast, Float8, Int4, Int8, PowerSGD, Quantize, TopK
from overlap.bench.training_setup import TrainingLoop, TrainingSetup
from overlap.bench.variant import variant
from overlap.bench.variants.updates import update_in_backward


@variant("torch-fp16")
def torch_fp16(setup: TrainingSetup) -> TrainingLoop:
    return _torch_hook(setup, default_hooks.fp16_compress_hook, setup.group)


@variant("torch-fp16-adamw", optimizer="adamw-fused")
def torch_fp16_adamw(setup: TrainingSetup) -> TrainingLoop:
    return _torch_hook(setup, default_hooks.fp16_compress_hook, setup.group)


@variant("overlap-fp16")
def overlap_fp16(setup: TrainingSetup) -> TrainingLoop:
    return update_in_backward(setup, Cast(torch.float16, AllReduce()))


@variant("torch-bf16")
def torch_bf16(setup: TrainingSetup) -> TrainingLoop:
    return _torch_hook(setup, default_hooks.bf16_compress_hook, setup.group)


@variant("overlap-bf16")
def overlap_bf16(setup: TrainingSetup) -> TrainingLoop:
    return update_in_backward(setup, Cast(torch.bfloat16, AllReduce()))


# On Gloo its collectives reach the ranks in different orders now and then, and abort the process.
@variant("torch-powersgd-r4", timed_alone=True)
def torch_powersgd_r4(setup: TrainingSetup) -> TrainingLoop:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    # Its earliest start: compressed from the third step on.
    state = powersgd.PowerSGDState(setup.group, matrix_approximation_rank=4, start_powerSGD_iter=2)
    return _torch_hook(setup, powersgd.powerSGD_hook, state)


@variant("overlap-powersgd-r4")
def overlap_powersgd_r4(setup: TrainingSetup) -> TrainingLoop:
    return update_in_backward(setup, PowerSGD(rank=4))


@variant("overlap-powersgd-r4-alternate")
def overlap_powersgd_r4_alternate(setup: TrainingSetup) -> TrainingLoop:
    return update_in_backward(setup, PowerSGD(rank=4, alternate=True))


@variant("overlap-powersgd-r4-int8")
def overlap_powersgd_r4_int8(setup: TrainingSetup) -> TrainingLoop:
    return update_in_backward(setup, PowerSGD(rank=4, wire=Int8()))


@variant("torch-quantize8")
def torch_quantize8(setup: TrainingSetup) -> TrainingLoop:
    from torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks import quantization_pertensor_hook

    return _torch_hook(setup, quantization_pertensor_hook, setup.group)


@variant("overlap-quantize8")
def overlap_quantize8(setup: TrainingSetup) -> TrainingLoop:
    return update_in_backward(setup, Quantize(Int8()))


@variant("overlap-quantize4")
def overlap_quantize4(setup: TrainingSetup) -> TrainingLoop:
    return update_in_backward(setup, Quantize(Int4()))


@variant("overlap-quantize4-feedback")
def overlap_quantize4_feedback(setup: TrainingSetup) -> TrainingLoop:
    return update_in_backward(setup, Quantize(Int4(), error_feedback=True))


@variant("overlap-float8")
def overlap_float8(setup: TrainingSetup) -> TrainingLoop:
    return update_in_backward(setup, Quantize(Float8()))


@variant("overlap-topk1-feedback")
def overlap_topk1_feedback(setup: TrainingSetup) -> TrainingLoop:
    return update_in_backward(setup, Quantize(TopK(0.01), error_feedback=True))


def _torch_hook(setup: TrainingSetup, hook: Any, state: object) -> TrainingLoop:
    """One of PyTorch's communication hooks, with the optimizer after backward as PyTorch has it."""
    ddp = setup.ddp()
    ddp.register_comm_hook(state, hook)
    return setup.plain_loop(ddp)
