"""A stage that fails, and the look whether the model can be used again."""

from __future__ import annotations

from typing import Any

import torch

from harness import wrap
from harness.models import MLP
from overlap import AllReduce, Bucket, Stage

__all__ = ["Flaky", "backward", "mean_gradients_are_right"]


class Flaky(Stage):
    """The all-reduce, which raises in one bucket of one step."""

    def __init__(self, step: int, index: int, *, after: bool, enabled: bool = True) -> None:
        self.inner, self.step, self.index, self.after, self.enabled = AllReduce(), step, index, after, enabled

    async def __call__(self, bucket: Bucket) -> None:
        due = self.enabled and (bucket.step, bucket.index) == (self.step, self.index)
        if due and not self.after:
            raise ValueError("the dog ate it")
        await self.inner(bucket)
        if due:
            raise ValueError("the dog ate it")


def backward(ddp: Any, step: int, rank: int) -> None:
    ddp.zero_grad()
    ddp(*MLP.batch(step, rank).inputs).square().sum().backward()


def mean_gradients_are_right(ddp: Any, step: int, rank: int, *, is_exact: bool) -> None:
    """Beside a new plain DDP, whose buckets are cut differently: at 3 ranks sums are taken in another order."""
    backward(ddp, step, rank)
    reference = wrap(ddp.module, **MLP.ddp_options())
    backward(reference, step, rank)
    tolerance = 0.0 if is_exact else 1e-5
    for ours, plain in zip(ddp.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, rtol=tolerance, atol=tolerance)
