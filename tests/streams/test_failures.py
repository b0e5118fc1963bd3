"""What a failure leaves behind in the buckets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from harness import run_ranks
from harness.streams import STREAMS_BACKEND, detecting
from overlap import Bucket, Stage, chain
from overlap.hooks import all_reduce

from .model import Net, batch, wrapped


class _Raises(Stage):
    """The mean; raises in bucket 1 of one step, while that of bucket 0 is in flight."""

    def __init__(self, step: int) -> None:
        self.step = step

    async def __call__(self, bucket: Bucket) -> None:
        if (bucket.step, bucket.index) == (self.step, 1):
            raise ValueError("the dog ate it")
        await all_reduce(bucket.buffer)
        bucket.buffer.div_(bucket.divisor)


def _reads_what_a_failure_left(rank: int, world_size: int) -> None:
    ddp = wrapped(Net)
    batches = [batch(step, rank) for step in range(6)]  # Made before: it is the device's.
    with detecting() as detector:
        chain(_Raises(3)).register(ddp)
        norms: list[Tensor] = []
        for step in range(6):
            try:
                _loss(ddp, *batches[step]).backward()
            except ValueError:
                assert step == 3
            # What is in flight writes the buckets, and these are the buckets.
            norms.extend(p.grad.norm() for p in ddp.parameters() if p.grad is not None)
            ddp.zero_grad()
        assert norms
    detector.report.check()


def _loss(ddp: Any, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = torch.nn.functional.mse_loss(ddp(x), y)
    return loss


def test_what_a_failure_leaves_in_the_buckets_can_be_read() -> None:
    run_ranks(_reads_what_a_failure_left, 2, backend=STREAMS_BACKEND)
