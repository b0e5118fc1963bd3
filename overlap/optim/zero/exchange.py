"""Gradients on their way to their owners, and new parameters on their way to all ranks.

Per bucket of N elements a rank sends N (W-1)/W in the reduction and as much in the gather, together as much as one
all-reduce sends; of whole parameters that holds for the sum of all buckets.

Both directions are one copy into a packed buffer, one exchange of its segments, and one copy out of it. The exchange is
a collective where the segments are of one length and the backend has one that sends no more; else it is messages.

[Note: messages]

On Gloo a large piece is sent from its own memory and, in the gather, received in the memory where it belongs, so it is
never copied: on a CPU all copies compete for memory bandwidth, and workspace would cost more than dividing the state
saves. Small pieces are packed, since each message has a cost of its own. Where the device has streams, all pieces are:
copying is cheap there next to sending, and pieces begin anywhere (see [Note: segments] in
:mod:`overlap.hooks.segments`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.device import has_streams
from overlap._torch.foreach import copy_all
from overlap.hooks import Bucket, all_gather, all_reduce, reduce_scatter, send_recv
from overlap.hooks.collectives import add_messages
from overlap.hooks.engine.wavefront import Item
from overlap.optim.zero.shards import BucketShards, Shard, shards_of_bucket

__all__ = ["Exchange", "Gather", "Workspace"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Gather(Item):
    """Bringing the parameters of one bucket to all ranks, as a piece of background work."""

    shards: BucketShards


@dataclass(frozen=True, eq=False)
class Exchange:
    """How the ranks of a group exchange gradients and parameters."""

    sends_directly: bool
    """Whether to send messages instead of collectives: on Gloo, whose reduce-scatter sends as much as an all-reduce,
    and whose all-gather copies its result. Segments of unequal lengths always are messages."""
    workspace: Workspace

    def shards_of(self, parameters: Sequence[Tensor], *known: Mapping[int, Shard]) -> BucketShards | None:
        """The shards of a bucket of these parameters; as :func:`shards_of_bucket`."""
        # DDP's first backward has one bucket of all parameters; its large buffers are not kept for smaller ones.
        self.workspace.trim()
        return shards_of_bucket(parameters, *known, packs_all=not self.sends_directly)

    async def reduce(self, bucket: Bucket, shards: BucketShards | None) -> None:
        """Make the part of ``bucket.buffer`` that this rank owns the mean; the rest becomes this rank's own gradient,
        divided. Parameters that are not sharded are averaged on every rank: all, where ``shards`` is ``None``."""
        if shards is None:
            bucket.buffer.mul_(1 / bucket.divisor)
            await all_reduce(bucket.buffer, group=bucket.group)
            return
        # As in DDP, each rank divides before the sum, which keeps half precision in range.
        bucket.buffer.mul_(1 / bucket.divisor)
        is_alone = bucket.index == 0 and bucket.is_last and not self.sends_directly
        for part, place in shards.in_turn if is_alone else [(shards, slice(None))]:
            if part.numel:
                await self._reduce(bucket.buffer[place], part, bucket.group)
        if rest := shards.rest(bucket.buffer):
            flat = torch.cat(rest)
            await all_reduce(flat, op=dist.ReduceOp.SUM, group=bucket.group)
            copy_all(rest, flat.split_with_sizes([part.numel() for part in rest]))

    async def _reduce(self, flat: Tensor, shards: BucketShards, group: dist.ProcessGroup) -> None:
        """Add the other ranks' gradients to the part of ``flat`` that this rank owns."""
        room = self.workspace.take(shards.packed_numel, flat)
        packed, own = room[: shards.packed_numel], shards.own_packed
        pieces, packed_pieces = shards.packed_of(flat), shards.cut_packed(packed)
        copy_all(packed_pieces, pieces)
        if self._is_collective(shards):
            await reduce_scatter(packed[shards.segments[shards.rank]], packed, group=group)
        else:
            sends: list[tuple[Tensor, int]] = []
            for peer in shards.peers:
                sends += zip(shards.messages(peer, flat, packed), repeat(peer))
            await add_messages(sends, list(zip(shards.messages(shards.rank, flat, packed))), group=group)
        copy_all(pieces[own], packed_pieces[own])
        self.workspace.give(room)

    async def gather(self, shards: BucketShards, group: dist.ProcessGroup) -> None:
        """Send the part of the parameters that each rank owns to all ranks, which changes the parameters."""
        if shards.numel == 0:
            return
        room = self.workspace.take(shards.packed_numel, shards.like)
        packed, own = room[: shards.packed_numel], shards.own_packed
        pieces = shards.cut_packed(packed)
        copy_all(pieces[own], shards.parameter_pieces[own])
        if self._is_collective(shards):
            await all_gather(packed, packed[shards.segments[shards.rank]], group=group)
        else:
            sends: list[tuple[Tensor, int]] = []
            receives: list[tuple[Tensor, int]] = []
            for peer in shards.peers:
                sends += zip(shards.new_parameters(shards.rank, packed), repeat(peer))
                receives += zip(shards.new_parameters(peer, packed), repeat(peer))
            await send_recv(sends, receives, group=group, label="all_gather")
        copy_all(shards.others_of(shards.parameter_pieces), shards.others_of(pieces))
        self.workspace.give(room)

    def _is_collective(self, shards: BucketShards) -> bool:
        return shards.is_even and not self.sends_directly


class Workspace:
    """Flat buffers, kept from bucket to bucket and step to step.

    On a CPU the first use of fresh memory takes longer than the copy into it. Accelerators have a caching allocator,
    which also knows about streams.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, numel: int, like: Tensor) -> Tensor:
        """A flat tensor of at least ``numel`` elements with undefined values, of the dtype and device of ``like``."""
        # The smallest that is large enough; or else a larger one replaces the largest, so there are never more than
        # were in use at once.
        found, taken = torch.empty(0, dtype=like.dtype, device=like.device), -1
        for place, kept in enumerate(self._free):
            is_better = found.numel() < kept.numel() if found.numel() < numel else numel <= kept.numel() < found.numel()
            if kept.dtype == like.dtype and is_better:
                found, taken = kept, place
        if taken >= 0:
            del self._free[taken]
        return found if found.numel() >= numel else torch.empty(numel, dtype=like.dtype, device=like.device)

    def give(self, buffer: Tensor) -> None:
        """Take back a buffer."""
        if not has_streams(buffer.device):
            self._free.append(buffer)

    def trim(self) -> None:
        """Free the buffers that are not in use, before buckets of other sizes."""
        self._free.clear()
