"""Sends chunks between their owners and the other ranks.

Per bucket of N elements a rank sends N (W-1)/W in the reduction and as much in the gather, together what one
all-reduce sends. If parameters are not cut (`ByParameter`), that holds for the sum of all buckets, but in one bucket a
rank may send more than another.

[Note: messages]

A large piece is sent from the memory it is in and, in the gather, received in the memory where it belongs, so it is
never copied: on a CPU, computing, packing and the network's own copies compete for memory bandwidth, and workspace
would cost more than dividing the state saves. Small pieces share one message, since each message has a cost of its own.
Sender and receiver use the same order: large pieces first, then the small ones. Where the device has streams, all
pieces for a rank are one message: copying is cheap there next to sending, and pieces begin anywhere (see
[Note: segments] in :mod:`overlap.hooks.segments`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.device import has_streams
from overlap._torch.foreach import add_all, copy_all
from overlap.hooks import Bucket, all_gather, all_reduce, reduce_scatter, send_recv
from overlap.hooks.engine.background import Item
from overlap.hooks.segments import cut_segments, room_for
from overlap.optim.zero.shards import BucketShards

__all__ = ["Exchange", "Gather", "Workspace", "sum_rest"]

# A message costs tens of microseconds, in which about 256 KB can be copied.
_LARGE_NUMEL = 64 * 1024


@dataclass(frozen=True, eq=False, kw_only=True)
class Gather(Item):
    """Bringing the parameters of one bucket to all ranks, as a piece of background work."""

    shards: BucketShards


@dataclass(frozen=True)
class Exchange:
    """How the ranks of a group exchange gradients and parameters."""

    sends_directly: bool
    """Whether to use messages between ranks instead of collectives: true on Gloo, whose reduce-scatter sends as much as
    an all-reduce, and whose all-gather copies its result. Segments of unequal lengths are always sent as messages."""
    workspace: Workspace

    async def reduce(self, bucket: Bucket, shards: BucketShards) -> None:
        """Make what this rank owns of ``bucket.buffer`` the mean; the rest becomes this rank's own gradient, divided.

        Parameters that are not sharded are averaged on every rank.
        """
        # As in DDP, each rank divides before the sum, which keeps half precision in range.
        bucket.buffer.mul_(1 / bucket.divisor)
        is_only = bucket.index == 0 and bucket.is_last
        for part, place in shards.in_turn if is_only else shards.whole:
            if not part.layout.packed_numel:
                continue
            if self.sends_directly or not part.layout.is_even:
                await _reduce_by_messages(bucket.buffer[place], part, bucket.group, self.workspace)
            else:
                await self._reduce_scatter(bucket.buffer[place], part, bucket.group)
        await sum_rest(bucket, shards)

    async def _reduce_scatter(self, flat: Tensor, shards: BucketShards, group: dist.ProcessGroup) -> None:
        packed = self.workspace.take(shards.layout.packed_numel, flat)
        pieces, packed_pieces = shards.cut_flat(flat), shards.cut_packed(packed)
        copy_all(packed_pieces, pieces)
        await reduce_scatter(packed[shards.segment], packed, group=group)
        copy_all(shards.own_of(pieces), shards.own_of(packed_pieces))
        self.workspace.give(packed)

    async def average(self, bucket: Bucket) -> None:
        """Make ``bucket.buffer``, of parameters that are not sharded, the mean on every rank."""
        bucket.buffer.mul_(1 / bucket.divisor)
        await all_reduce(bucket.buffer, group=bucket.group)

    async def gather(self, shards: BucketShards, group: dist.ProcessGroup) -> None:
        """Send what each rank owns of the parameters to all ranks. Changes the parameters."""
        if shards.layout.packed_numel == 0:
            return
        if self.sends_directly or not shards.layout.is_even:
            await _gather_by_messages(shards, group, self.workspace)
        else:
            await self._all_gather(shards, group)
        shards.note_written()

    async def _all_gather(self, shards: BucketShards, group: dist.ProcessGroup) -> None:
        packed = self.workspace.take(shards.layout.packed_numel, shards.parameter_pieces[0])
        pieces = shards.cut_packed(packed)
        copy_all(shards.own_of(pieces), shards.own_of(shards.parameter_pieces))
        await all_gather(packed, packed[shards.segment], group=group)
        copy_all(shards.others_of(shards.parameter_pieces), shards.others_of(pieces))
        self.workspace.give(packed)


async def sum_rest(bucket: Bucket, shards: BucketShards) -> None:
    """Sum what of the bucket is not sharded, on every rank."""
    rest = shards.rest(bucket.buffer)
    if not rest:
        return
    flat = torch.cat(rest)
    await all_reduce(flat, op=dist.ReduceOp.SUM, group=bucket.group)
    copy_all(rest, flat.split_with_sizes([part.numel() for part in rest]))


class _Transfer:
    """The pieces that one rank sends to another, as messages."""

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self.large = [piece for piece in pieces if _is_sent_in_place(piece)]
        self.small = [piece for piece in pieces if not _is_sent_in_place(piece)]
        self.small_numel = sum(piece.numel() for piece in self.small)
        self.numel = sum(piece.numel() for piece in self.large) + self.small_numel

    @property
    def pieces(self) -> list[Tensor]:
        """In the order in which they travel."""
        return [*self.large, *self.small]

    def messages(self, packed: Tensor) -> list[Tensor]:
        """What to send or receive; ``packed`` holds the small pieces."""
        return [*self.large, packed] if self.small_numel else self.large

    def pack(self, packed: Tensor) -> None:
        """Copy the small pieces together."""
        copy_all(_cut_like(packed, self.small), self.small)

    def unpack(self, packed: Tensor) -> None:
        """Copy the small pieces to where they belong."""
        copy_all(self.small, _cut_like(packed, self.small))


def _is_sent_in_place(piece: Tensor) -> bool:
    return piece.numel() >= _LARGE_NUMEL and not has_streams(piece.device)


def _cut_like(flat: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    return flat.split_with_sizes([piece.numel() for piece in pieces])


async def _reduce_by_messages(
    flat: Tensor, shards: BucketShards, group: dist.ProcessGroup, workspace: Workspace
) -> None:
    """Add the other ranks' gradients to what this rank owns of ``flat``, in the order of ranks.

    Sends each rank its part, ``N (W-1)/W`` elements in all, and receives as many into the workspace.
    """
    transfers = [_Transfer(pieces) for pieces in shards.by_rank(shards.cut_flat(flat))]
    own = transfers[shards.rank]
    others = [(rank, transfer) for rank, transfer in enumerate(transfers) if rank != shards.rank]
    outgoing_numels = [transfer.small_numel for _, transfer in others]
    incoming_numels = [own.numel] * len(others)
    outgoing = workspace.take(room_for(outgoing_numels, flat.device), flat)
    incoming = workspace.take(room_for(incoming_numels, flat.device), flat)
    outboxes, inboxes = cut_segments(outgoing, outgoing_numels), cut_segments(incoming, incoming_numels)
    sends: list[tuple[Tensor, int]] = []
    receives: list[tuple[Tensor, int]] = []
    for (rank, transfer), outbox, inbox in zip(others, outboxes, inboxes, strict=True):
        transfer.pack(outbox)
        sends += [(message, rank) for message in transfer.messages(outbox)]
        coming = inbox.split_with_sizes([*(piece.numel() for piece in own.large), own.small_numel])
        receives += [(message, rank) for message in coming if message.numel()]
    await send_recv(sends, receives, group=group, label="reduce_scatter")
    for inbox in inboxes:
        add_all(own.pieces, _cut_like(inbox, own.pieces))
    workspace.give(outgoing)
    workspace.give(incoming)


async def _gather_by_messages(shards: BucketShards, group: dist.ProcessGroup, workspace: Workspace) -> None:
    """Send what this rank owns of the parameters to the other ranks, and receive what they own."""
    transfers = [_Transfer(pieces) for pieces in shards.by_rank(shards.parameter_pieces)]
    own = transfers[shards.rank]
    numels = [transfer.small_numel for transfer in transfers]
    space = workspace.take(room_for(numels, shards.parameter_pieces[0].device), shards.parameter_pieces[0])
    boxes = cut_segments(space, numels)
    own.pack(boxes[shards.rank])
    others = [
        (rank, transfer, box)
        for rank, (transfer, box) in enumerate(zip(transfers, boxes, strict=True))
        if rank != shards.rank
    ]
    await send_recv(
        [(message, rank) for rank, _, _ in others for message in own.messages(boxes[shards.rank])],
        [(message, rank) for rank, transfer, box in others for message in transfer.messages(box)],
        group=group,
        label="all_gather",
    )
    for _, transfer, box in others:
        transfer.unpack(box)
    workspace.give(space)


class Workspace:
    """Flat buffers, kept from bucket to bucket and step to step.

    On a CPU the first use of fresh memory takes longer than the copy into it. Accelerators have a caching allocator,
    which also knows about streams.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, numel: int, like: Tensor) -> Tensor:
        """A flat tensor of ``numel`` elements with undefined values, of the dtype and device of ``like``."""
        if has_streams(like.device):
            return torch.empty(numel, dtype=like.dtype, device=like.device)
        same = sorted((kept for kept in self._free if kept.dtype == like.dtype), key=Tensor.numel)
        whole = next((kept for kept in same if kept.numel() >= numel), None)
        # A larger buffer replaces one that is too small, so there are never more than were in use at once.
        spent = whole if whole is not None else (same[-1] if same else None)
        self._free = [kept for kept in self._free if kept is not spent]
        if whole is None:
            whole = torch.empty(numel, dtype=like.dtype, device=like.device)
        part = whole[:numel]
        self._lent[id(part)] = (part, whole)
        return part

    def give(self, part: Tensor) -> None:
        """Take back what :meth:`take` gave."""
        if not has_streams(part.device):
            self._free.append(self._lent.pop(id(part))[1])

    def trim(self) -> None:
        """Free the buffers that are not lent, before buckets of other sizes."""
        self._free.clear()

    def forget(self) -> None:
        """Free all buffers, also those that were lent to work that failed."""
        self._free.clear()
        self._lent.clear()

    @property
    def held_bytes(self) -> int:
        """The size of the buffers kept for the next bucket."""
        return sum(kept.nbytes for kept in self._free)
