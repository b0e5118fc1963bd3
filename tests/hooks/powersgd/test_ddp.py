"""On real ranks: many buckets on Gloo, every way to register it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, bucket_calls, overlapped_step, plain_step, run_ranks, train, wrap
from harness.models import MLP, TRANSFORMER, Case
from overlap import (
    OverlappedOptimizer,
    PowerSGD,
    PowerSGDState,
    Step,
    as_stage,
    chain,
    powerSGD_hook,
    register,
)

STEPS = 6


def _optimizer(ddp: DistributedDataParallel) -> torch.optim.Optimizer:
    return torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)


def _run(case: Case, rank: int, attach: Callable[[Any], Any], *, min_buckets: int = 2, **ddp_options: Any) -> list[Any]:
    ddp = wrap(case.model(), **{**case.ddp_options(), **ddp_options})
    updates = attach(ddp)
    is_overlapped = isinstance(updates, OverlappedOptimizer)
    step_fn = overlapped_step if is_overlapped else plain_step
    optimizer = updates if is_overlapped else _optimizer(ddp)
    batches = case.batches(rank, steps=STEPS)
    return train(ddp, optimizer, batches, step_fn=step_fn, min_buckets=min_buckets, gradients=not is_overlapped)


def _many_buckets(rank: int) -> None:
    """One bucket is another order of collectives and other batches, but the same memory by parameter."""
    for options in ({}, {"alternate": True}):
        stages = [PowerSGD(rank=2, min_compression_rate=1, **options) for _ in range(2)]
        with bucket_calls(PowerSGD) as calls:
            records = _run(TRANSFORMER, rank, lambda ddp, stage=stages[0]: register(ddp, stage))
        assert max(calls) >= 2 and stages[0].compression_stats()[0] > 1.5
        first = copy.deepcopy(records[-1].parameters)
        for parameter in first.values():
            dist.broadcast(parameter, 0)
        assert_parity(records[-1].parameters, first, what="parameters of rank 0")
        one = {"min_buckets": 1, "bucket_cap_mb": 25}
        reference = _run(TRANSFORMER, rank, lambda ddp, stage=stages[1]: register(ddp, stage), **one)
        assert_parity(
            records, reference, what=f"{options}, cut in many buckets", exact=False, rtol=1e-3, atol=1e-5,
            reason="collectives of other sizes add up in another order, and six steps depend on each other",
        )  # fmt: skip


def _play(rank: int, world_size: int) -> None:
    _many_buckets(rank)
    _every_way_is_the_same(rank)


def test_on_two_ranks() -> None:
    run_ranks(_play, 2, timeout_s=180)
