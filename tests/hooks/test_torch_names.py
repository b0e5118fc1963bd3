"""The hooks of PyTorch's names, against PyTorch's own."""

import functools
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import overlap
from harness import assert_parity, on_ranks
from overlap import AllReduce, as_hook, register

from .runs import run, to_ddp


def _bf16_by_hand(state, bucket):  # type: ignore[no-untyped-def]
    """PyTorch's bf16 hook refuses Gloo; this is the same arithmetic."""
    compressed = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(compressed, async_op=True)
    return work.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))


# PyTorch's hook, and ours that equal it.
HOOKS: dict[Any, list[Any]] = {
    default_hooks.allreduce_hook: [overlap.allreduce_hook],
    default_hooks.fp16_compress_hook: [overlap.fp16_compress_hook],
    _bf16_by_hand: [overlap.bf16_compress_hook, overlap.bf16_compress_wrapper(overlap.allreduce_hook)],
    default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook): [
        overlap.fp16_compress_wrapper(default_hooks.allreduce_hook)
    ],
}


@on_ranks(2)
def test_a_hook_equals_pytorchs_however_it_is_registered(rank: int, world_size: int) -> None:
    for theirs, all_of_ours in HOOKS.items():
        reference = run(rank, functools.partial(to_ddp, hook=theirs))
        for ours in all_of_ours:
            assert_parity(run(rank, functools.partial(register, stage=ours)), reference, what=f"{ours}, registered")
            given = functools.partial(to_ddp, hook=ours, state=dist.group.WORLD)
            if ours in (overlap.allreduce_hook, overlap.fp16_compress_hook):
                assert_parity(run(rank, given), reference, what=f"{ours}, given to DDP with a group")


def test_a_hook_pickles_by_name_and_a_stage_as_a_hook_refuses() -> None:
    for name in ("allreduce_hook", "bf16_compress_hook", "noop_hook"):
        hook = getattr(overlap, name)
        assert pickle.loads(pickle.dumps(hook)) is hook
    with pytest.raises(TypeError, match="belongs to one model"):
        pickle.dumps(as_hook(AllReduce()))
