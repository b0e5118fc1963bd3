"""Moving chunks between their owners and the other ranks: what a stage awaits.

Per bucket of N elements a rank sends N (W-1)/W in the reduction and as much in the gather, together what one
all-reduce sends. Where parameters are not cut (`ByParameter`), segments have lengths of their own and go as messages
between ranks at their exact lengths; that is as much over all buckets, but in one bucket a rank may send more than
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.foreach import copy_all
from overlap.hooks import Bucket, all_gather, all_reduce, reduce_scatter, send_recv
from overlap.optim.zero.plan import Plan, Workspace

__all__ = ["Exchange"]


@dataclass(frozen=True)
class Exchange:
    """How the ranks of one group exchange chunks."""

    rank: int
    workspace: Workspace

    async def reduce(self, bucket: Bucket, plan: Plan) -> None:
        """Turn what this rank owns of ``bucket.buffer`` into the mean; other ranks' parts stay as they are.

        Parameters that are not sharded are averaged on every rank.
        """
        # As DDP does it, each rank divides before the sum, which keeps half precision in range.
        factor = 1 / bucket.divisor
        if plan.layout.packed_numel:
            pieces = plan.cut_flat(bucket.buffer)
            packed = self.workspace.take(plan.layout.packed_numel, bucket.buffer)
            packed_pieces = plan.cut_packed(packed)
            _scale_into(packed_pieces, pieces, packed, factor)
            if plan.layout.is_even:
                await reduce_scatter(packed[plan.segment], packed, group=bucket.group)
            else:
                await self._sum_directly(bucket, plan, packed)
            copy_all(plan.own_of(pieces), plan.own_of(packed_pieces))
            self.workspace.give(packed)
        await _average_rest(bucket, plan, factor)

    async def _sum_directly(self, bucket: Bucket, plan: Plan, packed: Tensor) -> None:
        others = [rank for rank in range(plan.layout.ranks) if rank != self.rank]
        own = packed[plan.segment]
        received = {rank: torch.empty_like(own) for rank in others} if own.numel() else {}
        await send_recv(
            [(packed[plan.layout.segment(rank)], rank) for rank in others if plan.layout.segment_numels[rank]],
            [(tensor, rank) for rank, tensor in received.items()],
            group=bucket.group,
        )
        for tensor in received.values():
            own.add_(tensor)

    async def gather(self, bucket: Bucket, plan: Plan) -> None:
        """Bring what each rank owns of the parameters to all."""
        if plan.layout.packed_numel == 0:
            return
        packed = self.workspace.take(plan.layout.packed_numel, plan.parameter_pieces[0])
        pieces = plan.cut_packed(packed)
        plan.load(pieces)
        own = packed[plan.segment]
        if plan.layout.is_even:
            await all_gather(packed, own, group=bucket.group)
        else:
            others = [rank for rank in range(plan.layout.ranks) if rank != self.rank]
            await send_recv(
                [(own, rank) for rank in others if own.numel()],
                [(packed[plan.layout.segment(r)], r) for r in others if plan.layout.segment_numels[r]],
                group=bucket.group,
            )
        plan.unload(pieces)
        self.workspace.give(packed)


def _scale_into(targets: Sequence[Tensor], sources: Sequence[Tensor], packed: Tensor, factor: float) -> None:
    if packed.device.type == "cpu":
        # One pass over memory instead of two.
        for target, source in zip(targets, sources, strict=True):
            torch.mul(source, factor, out=target)
        return
    copy_all(targets, sources)
    packed.mul_(factor)


async def _average_rest(bucket: Bucket, plan: Plan, factor: float) -> None:
    rest = plan.rest(bucket.buffer)
    if not rest:
        return
    flat = torch.cat(rest).mul_(factor)
    await all_reduce(flat, op=dist.ReduceOp.SUM, group=bucket.group)
    copy_all(rest, flat.split_with_sizes([part.numel() for part in rest]))
