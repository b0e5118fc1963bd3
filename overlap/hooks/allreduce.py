"""Reducers that give the exact mean."""

from __future__ import annotations

import torch

from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import all_gather, all_reduce
from overlap.hooks.stage import Stage

__all__ = ["AllGather", "AllReduce", "NoReduction"]


class AllReduce(Stage):
    """The mean of the gradients over ranks, by one all-reduce a bucket.

    Equal to plain DDP bit for bit at any number of ranks: like DDP, each rank multiplies its gradient by
    ``1 / divisor`` first, which also keeps a sum of half-precision gradients within their range.

    Issues: one all-reduce of ``(numel,)`` in the bucket's dtype. Changes: ``bucket.buffer``.

    >>> AllReduce()
    AllReduce()
    """

    async def __call__(self, bucket: Bucket) -> None:
        bucket.buffer.mul_(1 / bucket.divisor)
        await all_reduce(bucket.buffer, group=bucket.group)


class AllGather(Stage):
    """The mean of the gradients over ranks, by gathering all of them and adding up in ranks' order on each.

    Moves ``W/2`` times what an all-reduce does and takes ``W`` buckets of memory; good for comparing what a reduction's
    order of summation changes, since here it is the same for every element.

    Issues: one all-gather of ``(numel,)`` in the bucket's dtype. Changes: ``bucket.buffer``.
    """

    async def __call__(self, bucket: Bucket) -> None:
        ranks = bucket.group.size()
        gathered = torch.empty(ranks * bucket.buffer.numel(), dtype=bucket.buffer.dtype, device=bucket.buffer.device)
        await all_gather(gathered, bucket.buffer, group=bucket.group)
        torch.sum(gathered.view(ranks, -1), dim=0, out=bucket.buffer)
        bucket.buffer.mul_(1 / bucket.divisor)


class NoReduction(Stage):
    """Leaves each rank's own gradient as it is; to measure what communication costs, or to reduce by other means."""

    async def __call__(self, bucket: Bucket) -> None:
        return
