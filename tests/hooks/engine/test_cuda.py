"""On an accelerator, an update that would stop the host in each hook is refused. What is allowed: `tests/gpu`."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from harness import overlapped_step, run_ranks, train
from harness.models import MLP, Batch
from overlap import AllReduce, OverlappedOptimizer, Step, UnsupportedError, chain

pytestmark = pytest.mark.gpu

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


def _refuses_unused(rank: int, world_size: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    options = {**MLP.ddp_options(), "find_unused_parameters": True}
    ddp = DistributedDataParallel(MLP.model().to(device), device_ids=[device.index], **options)
    optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
    with pytest.raises(UnsupportedError, match="deferred=True"):
        chain(AllReduce(), Step(optimizer)).register(ddp)
    chain(AllReduce(), Step(optimizer, deferred=True)).register(ddp)
    batches = [
        Batch(tuple(x.to(device) for x in batch.inputs), batch.target.to(device))
        for batch in MLP.batches(rank, steps=4)
    ]
    train(ddp, optimizer, batches, step_fn=overlapped_step)


def test_interleaved_updates_that_would_stop_the_host_are_refused() -> None:
    run_ranks(_refuses_unused, 1, backend="nccl", timeout_s=120, group_timeout_s=100)
