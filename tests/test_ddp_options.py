"""Options of DistributedDataParallel since torch 2.13: every form trains as plain DDP does with the same option."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, overlapped_step, plain_step, run_ranks, wrap
from harness.models import BATCH_NORM, UNUSED, Case, mean_squared_error
from overlap import AllReduce, OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep, chain

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2)
OPTIONS: dict[str, tuple[Case, dict[str, Any]]] = {
    "batched_grad_copy": (BATCH_NORM, {"batched_grad_copy": True}),
    "bucket_cap_mb_list": (BATCH_NORM, {"bucket_cap_mb": None, "bucket_cap_mb_list": [0.001, 0.002, 0.004]}),
    "forward_sync_buffers": (BATCH_NORM, {"forward_sync_buffers": False}),
    "skip_all_reduce_unused_params": (UNUSED, {"skip_all_reduce_unused_params": True}),
}


def _plain(ddp: DistributedDataParallel) -> tuple[Any, Any]:
    return ADAMW(ddp.parameters()), plain_step


def _without_update(ddp: DistributedDataParallel) -> tuple[Any, Any]:
    chain(AllReduce()).register(ddp)
    return ADAMW(ddp.parameters()), plain_step


def _stepped(ddp: DistributedDataParallel, *, deferred: bool) -> tuple[Any, Any]:
    optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
    chain(AllReduce(), Step(optimizer, deferred=deferred)).register(ddp)
    return optimizer, overlapped_step


def _sharded(ddp: DistributedDataParallel) -> tuple[Any, Any]:
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-2)
    chain(ZeroStep(optimizer)).register(ddp)
    return optimizer, overlapped_step


FORMS: dict[str, Callable[[DistributedDataParallel], tuple[Any, Any]]] = {
    "reducer": _without_update,
    "interleaved": functools.partial(_stepped, deferred=False),
    "deferred": functools.partial(_stepped, deferred=True),
    "sharded": _sharded,
}


def _trained(rank: int, world_size: int) -> None:
    for name, (case, options) in OPTIONS.items():
        if name not in inspect.signature(DistributedDataParallel).parameters:
            continue
        records = {}
        for form, make in {"plain": _plain, **FORMS}.items():
            ddp = wrap(case.model(), **{**case.ddp_options(), **options})
            optimizer, step = make(ddp)
            losses = [step(ddp, optimizer, batch, mean_squared_error).detach() for batch in case.batches(rank, steps=4)]
            records[form] = losses, list(ddp.parameters()), list(ddp.buffers())
        for form in FORMS:
            assert_parity(records[form], records["plain"], what=f"{name}, {form}")


@pytest.mark.skipif(
    "batched_grad_copy" not in inspect.signature(DistributedDataParallel).parameters, reason="DDP has none of them"
)
def test_every_form_equals_plain_ddp_in_every_bit_under_each_option() -> None:
    run_ranks(_trained, 2)
