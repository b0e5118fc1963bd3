"""Functions and hooks as stages, and stages as hooks."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import overlap
from harness import assert_parity, on_ranks, train, wrap
from harness.models import MLP
from overlap import AllReduce, ConfigurationError, OverlappedOptimizer, Step, as_hook, as_stage, chain

from .runs import SGD, Attach, plain, run, to_ddp


class _CallableHook:
    def __call__(self, process_group: Any, gradients: Any) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.allreduce_hook(process_group, gradients)


def _string_annotated(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return default_hooks.allreduce_hook(state, bucket)


@overlap.reducer
async def _mean(bucket: overlap.Bucket) -> None:
    bucket.buffer.mul_(1 / bucket.divisor)
    await overlap.hooks.all_reduce(bucket.buffer, group=bucket.group)


TAKEN: dict[str, Callable[..., Any]] = {
    "a function with string annotations": _string_annotated,
    "a lambda with other names": lambda s, b: _string_annotated(s, bucket=b),
    "a callable instance": _CallableHook(),
    "a partial": functools.partial(default_hooks._compress_hook, torch.float32),
    "varargs": lambda *arguments: _string_annotated(arguments[0], arguments[1]),
    "an async function of a bucket": _mean,
}


@on_ranks(2)
def test_any_callable_of_two_arguments_is_taken_as_a_hook_and_one_of_a_bucket_as_a_stage(rank: int) -> None:
    reference = run(rank, plain)
    one_hook = as_hook(chain(AllReduce()))
    ways: dict[str, Attach] = {
        **{kind: chain(hook).register for kind, hook in TAKEN.items()},
        "a hook with its state": lambda ddp: overlap.register(ddp, _string_annotated, dist.group.WORLD),
        "a stage as a hook": lambda ddp: to_ddp(ddp, one_hook),
        "the same hook for another model": lambda ddp: to_ddp(ddp, one_hook),
    }
    for kind, attach in ways.items():
        assert_parity(run(rank, attach), reference, what=kind)


@on_ranks(2)
def test_a_foreign_hook_chains_with_an_update(rank: int, world_size: int) -> None:
    def state() -> Any:
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)

    options = {"bucket_cap_mb": 25}  # PyTorch's PowerSGD works with one bucket.
    batches = MLP.batches(rank, steps=6)
    ddp = wrap(MLP.model(), **options)
    ddp.register_comm_hook(state(), powerSGD_hook.powerSGD_hook)
    reference = train(ddp, SGD(ddp.parameters()), batches, min_buckets=1)
    ddp = wrap(MLP.model(), **options)
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(as_stage(powerSGD_hook.powerSGD_hook, state()), Step(optimizer)).register(ddp)
    assert_parity(train(ddp, optimizer, batches, min_buckets=1), reference, what="PyTorch's PowerSGD, then Step")


def test_a_hook_of_three_arguments_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be called with \(state, bucket\)"):
        as_stage(lambda one, two, three: None)
