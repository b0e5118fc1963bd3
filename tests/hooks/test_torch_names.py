"""The hooks of PyTorch's names, against PyTorch's own."""

from __future__ import annotations

import functools
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import overlap
from harness import assert_parity
from overlap import AllReduce, as_hook, chain, register

from .runs import to_ddp, trained


def _registered_with_a_group(ddp: Any, hook: Any) -> None:
    register(ddp, hook, dist.group.WORLD)


def _given_to_ddp_with_a_group(ddp: Any, hook: Any) -> None:
    to_ddp(ddp, hook, dist.group.WORLD)


def _chained(ddp: Any, hook: Any) -> None:
    chain(hook).register(ddp)


@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook"])
def test_a_hook_equals_pytorchs_however_it_is_registered(name: str) -> None:
    ours, theirs = getattr(overlap, name), getattr(default_hooks, name)
    reference, *runs = trained(
        functools.partial(to_ddp, hook=theirs),
        functools.partial(register, stage=ours),
        functools.partial(_registered_with_a_group, hook=ours),
        functools.partial(_chained, hook=ours),
        functools.partial(to_ddp, hook=ours),
        functools.partial(_given_to_ddp_with_a_group, hook=ours),
    )
    for way, records in enumerate(runs):
        assert_parity(records, reference, what=f"{name}, way {way}")


def _bf16_by_hand(state, bucket):  # type: ignore[no-untyped-def]
    compressed = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(compressed, async_op=True)
    return work.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))


def test_the_bf16_hook_and_wrapper_cast_on_gloo() -> None:
    # PyTorch's bf16 hook refuses Gloo; the same arithmetic by hand is the reference.
    hook, wrapped = overlap.bf16_compress_hook, overlap.bf16_compress_wrapper(overlap.allreduce_hook)
    reference, *runs = trained(
        functools.partial(to_ddp, hook=_bf16_by_hand),
        functools.partial(register, stage=hook),
        functools.partial(to_ddp, hook=hook),
        functools.partial(register, stage=wrapped),
        functools.partial(to_ddp, hook=wrapped),
    )
    for way, records in enumerate(runs):
        assert_parity(records, reference, what=f"bf16, way {way}")


def test_the_fp16_wrapper_of_a_pytorch_hook_equals_pytorchs() -> None:
    theirs, ours = trained(
        functools.partial(to_ddp, hook=default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        functools.partial(register, stage=overlap.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    )
    assert_parity(ours, theirs, what="a PyTorch hook in fp16")


@pytest.mark.parametrize(
    "name",
    ["allreduce_hook", "allgather_then_aggregate_hook", "fp16_compress_hook", "bf16_compress_hook", "noop_hook"],
)
def test_a_hook_pickles_by_name(name: str) -> None:
    hook = getattr(overlap, name)
    assert pickle.loads(pickle.dumps(hook)) is hook


def test_a_stage_as_a_hook_refuses_to_be_pickled() -> None:
    with pytest.raises(TypeError, match="belongs to one model"):
        pickle.dumps(as_hook(AllReduce()))
