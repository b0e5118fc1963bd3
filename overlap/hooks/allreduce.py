"""Reducers that give the exact mean."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import all_gather, all_reduce
from overlap.hooks.segments import round_up, segment_multiple
from overlap.hooks.stage import Stage

__all__ = ["AllGather", "AllReduce", "NoReduction"]


class AllReduce(Stage):
    """The mean of the gradients over ranks, by one all-reduce per bucket.

    Equal to plain DDP bit for bit at any number of ranks: as in DDP, each rank multiplies its gradient by
    ``1 / divisor`` first, so that a sum of half-precision gradients does not overflow.

    Communication: one all-reduce of ``(numel,)`` in the bucket's dtype. Changes: ``bucket.buffer``.

    >>> AllReduce()
    AllReduce()
    """

    async def __call__(self, bucket: Bucket) -> None:
        bucket.buffer.mul_(1 / bucket.divisor)
        await all_reduce(bucket.buffer, group=bucket.group)


class AllGather(Stage):
    """The mean of the gradients over ranks: each rank gathers all of them and sums them in the order of ranks.

    Sends ``W/2`` times as much as an all-reduce and takes ``W`` buckets of memory. Every element is summed in the same
    order, so it shows what the order of summation in another reducer changes.

    Communication: one all-gather of ``(numel,)`` in the bucket's dtype. Changes: ``bucket.buffer``.

    >>> chain(AllGather()).register(ddp)
    <chain(AllGather()) registered>
    >>> loss_fn(ddp(x), y).backward()
    """

    async def __call__(self, bucket: Bucket) -> None:
        buffer, ranks = bucket.buffer, bucket.group.size()
        numel = round_up(buffer.numel(), segment_multiple(buffer.device))
        own = buffer if buffer.numel() == numel else pad(buffer, (0, numel - buffer.numel()))
        gathered = torch.empty(ranks, numel, dtype=buffer.dtype, device=buffer.device)
        await all_gather(gathered.view(-1), own, group=bucket.group)
        torch.sum(gathered[:, : buffer.numel()], dim=0, out=buffer)
        buffer.mul_(1 / bucket.divisor)


class NoReduction(Stage):
    """Leaves each rank's own gradient as it is, to measure the cost of communication or to reduce by other means.

    >>> chain(NoReduction()).register(ddp)  # on several ranks each keeps its own gradients
    <chain(NoReduction()) registered>
    >>> loss_fn(ddp(x), y).backward()
    """

    async def __call__(self, bucket: Bucket) -> None:
        return
