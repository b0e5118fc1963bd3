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

from overlap._torch.foreach import add_all, copy_all, scale_
from overlap.hooks import Bucket, all_gather, all_reduce, reduce_scatter, send_recv
from overlap.optim.zero.plan import Plan, Workspace

__all__ = ["Exchange"]


@dataclass(frozen=True)
class Exchange:
    """How the ranks of one group exchange chunks."""

    rank: int
    sends_directly: bool
    """Whether to reduce by messages between ranks (Gloo, whose reduce-scatter moves as much as an all-reduce)."""
    workspace: Workspace

    async def reduce(self, bucket: Bucket, plan: Plan) -> None:
        """Turn what this rank owns of ``bucket.buffer`` into the mean; other ranks' parts stay as they are.

        Parameters that are not sharded are averaged on every rank.
        """
        # As DDP does it, each rank divides before the sum, which keeps half precision in range.
        factor = 1 / bucket.divisor
        if plan.layout.packed_numel:
            if plan.layout.is_even and not self.sends_directly:
                await self._reduce_scatter(bucket, plan, factor)
            else:
                await self._send(bucket, plan, factor)
        await _average_rest(bucket, plan, factor)

    async def _reduce_scatter(self, bucket: Bucket, plan: Plan, factor: float) -> None:
        packed = self.workspace.take(plan.layout.packed_numel, bucket.buffer)
        pieces, packed_pieces = plan.cut_flat(bucket.buffer), plan.cut_packed(packed)
        _scale_into(packed_pieces, pieces, factor)
        await reduce_scatter(packed[plan.segment], packed, group=bucket.group)
        copy_all(plan.own_of(pieces), plan.own_of(packed_pieces))
        self.workspace.give(packed)

    async def _send(self, bucket: Bucket, plan: Plan, factor: float) -> None:
        """Send each rank its part and add up what comes; this rank's own part never leaves the bucket."""
        layout, numel = plan.layout, plan.layout.owned_numels[self.rank]
        others = [rank for rank in range(layout.ranks) if rank != self.rank]
        space = self.workspace.take(layout.packed_numel + numel * len(others[1:]), bucket.buffer)
        packed = space[: layout.packed_numel]
        pieces, packed_pieces = plan.cut_flat(bucket.buffer), plan.cut_packed(packed)
        _scale_into(plan.others_of(packed_pieces), plan.others_of(pieces), factor)
        own = plan.own_of(pieces)
        scale_(own, factor)
        # The first one's part comes to where this rank's own would be.
        places = [plan.part_of(packed, self.rank), *space[layout.packed_numel :].split(numel or 1)]
        received = list(zip(places, others, strict=False)) if numel else []
        sends = [(plan.part_of(packed, rank), rank) for rank in others if layout.owned_numels[rank]]
        await send_recv(sends, received, group=bucket.group)
        for part, _ in received:
            add_all(own, part.split_with_sizes([piece.numel() for piece in own]))
        self.workspace.give(space)

    async def gather(self, bucket: Bucket, plan: Plan) -> None:
        """Bring what each rank owns of the parameters to all."""
        if plan.layout.packed_numel == 0:
            return
        packed = self.workspace.take(plan.layout.packed_numel, plan.parameter_pieces[0])
        pieces = plan.cut_packed(packed)
        plan.load(pieces)
        if plan.layout.is_even:
            await all_gather(packed, packed[plan.segment], group=bucket.group)
        else:
            own = plan.part_of(packed, self.rank)
            others = [rank for rank in range(plan.layout.ranks) if rank != self.rank]
            await send_recv(
                [(own, rank) for rank in others if own.numel()],
                [(plan.part_of(packed, r), r) for r in others if plan.layout.owned_numels[r]],
                group=bucket.group,
            )
        plan.unload(pieces)
        self.workspace.give(packed)


def _scale_into(targets: Sequence[Tensor], sources: Sequence[Tensor], factor: float) -> None:
    if targets and targets[0].device.type == "cpu":
        # One pass over memory instead of two.
        for target, source in zip(targets, sources, strict=True):
            torch.mul(source, factor, out=target)
        return
    copy_all(targets, sources)
    scale_(targets, factor)


async def _average_rest(bucket: Bucket, plan: Plan, factor: float) -> None:
    rest = plan.rest(bucket.buffer)
    if not rest:
        return
    flat = torch.cat(rest).mul_(factor)
    await all_reduce(flat, op=dist.ReduceOp.SUM, group=bucket.group)
    copy_all(rest, flat.split_with_sizes([part.numel() for part in rest]))
