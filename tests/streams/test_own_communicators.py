"""What a failure leaves behind, on a communicator of the stages' own and on the model's group."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import run_ranks
from harness.streams import STREAMS_BACKEND, detecting
from overlap import Bucket, Stage, chain
from overlap._torch.communicators import Communicators, communicators_replaced
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


def _reads_what_a_failure_left(rank: int, world_size: int, is_private: bool) -> None:
    ddp = wrapped(Net)
    batches = [batch(step, rank) for step in range(6)]  # Made before: it is the device's.
    # PyTorch's own can make none for this group.
    communicators: Any = contextlib.nullcontext() if is_private else communicators_replaced(Communicators())
    with detecting() as detector, communicators:
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


@pytest.mark.parametrize("is_private", [True, False], ids=["own communicator", "the group itself"])
def test_what_a_failure_leaves_in_the_buckets_can_be_read(is_private: bool) -> None:
    run_ranks(_reads_what_a_failure_left, 2, is_private, backend=STREAMS_BACKEND)
