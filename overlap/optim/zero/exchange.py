"""Moving chunks between their owners and the other ranks: what a stage awaits.

Per bucket of N elements a rank sends N (W-1)/W in the reduction and as much in the gather, together what one
all-reduce sends. Where parameters are not cut (`ByParameter`), that is as much over all buckets, but in one bucket a
rank may send more than others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from overlap._torch.foreach import copy_all
from overlap.hooks import Bucket, all_gather, all_reduce, reduce_scatter
from overlap.optim.zero.messages import gather_by_messages, reduce_by_messages
from overlap.optim.zero.plan import Plan, Workspace

__all__ = ["Exchange"]


@dataclass(frozen=True)
class Exchange:
    """How the ranks of one group exchange chunks."""

    sends_directly: bool
    """Whether by messages between ranks and not by collectives: on Gloo, whose reduce-scatter moves as much as an
    all-reduce, and whose all-gather makes a copy of its result. Segments of unequal lengths always go that way."""
    workspace: Workspace

    async def reduce(self, bucket: Bucket, plan: Plan) -> None:
        """Turn what this rank owns of ``bucket.buffer`` into the mean; the rest is this rank's own gradient, divided.

        Parameters that are not sharded are averaged on every rank.
        """
        # As DDP does it, each rank divides before the sum, which keeps half precision in range.
        bucket.buffer.mul_(1 / bucket.divisor)
        if plan.layout.packed_numel:
            if self.sends_directly or not plan.layout.is_even:
                await reduce_by_messages(bucket, plan, self.workspace)
            else:
                await self._reduce_scatter(bucket, plan)
        await _sum_rest(bucket, plan)

    async def _reduce_scatter(self, bucket: Bucket, plan: Plan) -> None:
        packed = self.workspace.take(plan.layout.packed_numel, bucket.buffer)
        pieces, packed_pieces = plan.cut_flat(bucket.buffer), plan.cut_packed(packed)
        copy_all(packed_pieces, pieces)
        await reduce_scatter(packed[plan.segment], packed, group=bucket.group)
        copy_all(plan.own_of(pieces), plan.own_of(packed_pieces))
        self.workspace.give(packed)

    async def gather(self, plan: Plan, group: dist.ProcessGroup) -> None:
        """Bring what each rank owns of the parameters to all."""
        if plan.layout.packed_numel == 0:
            return
        if self.sends_directly or not plan.layout.is_even:
            await gather_by_messages(plan, group, self.workspace)
        else:
            await self._all_gather(plan, group)
        plan.note_written()

    async def _all_gather(self, plan: Plan, group: dist.ProcessGroup) -> None:
        packed = self.workspace.take(plan.layout.packed_numel, plan.parameter_pieces[0])
        pieces = plan.cut_packed(packed)
        copy_all(plan.own_of(pieces), plan.own_of(plan.parameter_pieces))
        await all_gather(packed, packed[plan.segment], group=group)
        copy_all(plan.others_of(plan.parameter_pieces), plan.others_of(pieces))
        self.workspace.give(packed)


async def _sum_rest(bucket: Bucket, plan: Plan) -> None:
    rest = plan.rest(bucket.buffer)
    if not rest:
        return
    flat = torch.cat(rest)
    await all_reduce(flat, op=dist.ReduceOp.SUM, group=bucket.group)
    copy_all(rest, flat.split_with_sizes([part.numel() for part in rest]))
