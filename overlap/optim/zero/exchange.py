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

[Note: wires of a sharded update]

A gradient is rounded once on its way to its owner, who sums in fp32 with its own part as it is; an all-reduce through a
wire rounds twice (ZeRO++'s qgZ, https://arxiv.org/abs/2306.10209, sends directly for the same reason).

Parameters travel as differences from the parameters that all ranks have: an optimizer's steps are small next to the
weights, so a difference keeps more in few bits (SDP4Bit, https://arxiv.org/abs/2410.15526). The owner of a part keeps
its true weights beside the parameter (see :meth:`Shard.keep_true`). It encodes the difference of the two, and every
rank, the owner too, adds the same decoded message to the parameter. So parameters are equal on all ranks bit for bit,
and the next difference holds the rounding error of the one before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, repeat

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.device import has_streams
from overlap._torch.foreach import add_all, all_finite, copy_all, subtract_all
from overlap.hooks import Bucket, all_gather, all_reduce, reduce_scatter, send_recv
from overlap.hooks.collectives import add_messages, all_to_all
from overlap.hooks.engine.wavefront import Item
from overlap.hooks.wires import ErrorFeedback, Wire
from overlap.hooks.wires.exchange import sum_in_order
from overlap.hooks.wires.feedback import StageMemory
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
    reduce_wire: Wire | None = None
    """How gradients travel; in full where ``None``. See [Note: wires of a sharded update]."""
    gather_wire: Wire | None = None
    """How parameters travel, likewise."""
    memory: StageMemory | None = None
    """Of the wires."""

    def shards_of(self, parameters: Sequence[Tensor], *known: Mapping[int, Shard]) -> BucketShards | None:
        """The shards of a bucket of these parameters; as :func:`shards_of_bucket`."""
        # DDP's first backward has one bucket of all parameters; its large buffers are not kept for smaller ones.
        self.workspace.trim()
        packs_all = self.memory is not None or not self.sends_directly or has_streams(parameters[0].device)
        return shards_of_bucket(parameters, *known, packs_all=packs_all)

    async def reduce(self, bucket: Bucket, shards: BucketShards | None) -> None:
        """Make the part of ``bucket.buffer`` that this rank owns the mean; the rest becomes this rank's own gradient,
        divided. Parameters that are not sharded are averaged on every rank: all, where ``shards`` is ``None``."""
        if shards is None:
            bucket.buffer.mul_(1 / bucket.divisor)
            await all_reduce(bucket.buffer, group=bucket.group)
            self._note([bucket.buffer])
            return
        if self.reduce_wire is not None:
            await self._reduce_through(self.reduce_wire, bucket, shards)
        else:
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
            self._note(rest)

    async def gather(self, shards: BucketShards, group: dist.ProcessGroup) -> None:
        """Send the part of the parameters that each rank owns to all ranks, which changes the parameters."""
        if shards.numel == 0:
            return
        if self.gather_wire is not None:
            await self._gather_through(self.gather_wire, shards, group)
        else:
            await self._gather(shards, group)
        shards.note_written()

    def _note(self, means: Sequence[Tensor]) -> None:
        """``means`` are of gradients that are not sharded: where they are not finite, the pass is not applied, so it
        may not change the memory of the wire either."""
        if (feedback := self._feedback) is not None:
            for mean in means:
                feedback.note(mean)

    def _is_collective(self, shards: BucketShards) -> bool:
        return shards.is_even and not self.sends_directly

    # In full, as in [Note: messages] ------------------------------------------------------------------------

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

    async def _gather(self, shards: BucketShards, group: dist.ProcessGroup) -> None:
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

    # Through wires, as in [Note: wires of a sharded update] --------------------------------------------------

    async def _reduce_through(self, wire: Wire, bucket: Bucket, shards: BucketShards) -> None:
        """As :meth:`reduce`, but parameters that are not sharded are only divided."""
        feedback = self._feedback
        values = bucket.buffer.to(torch.float32, copy=feedback is not None).mul_(1 / bucket.divisor)
        if values is not bucket.buffer:
            bucket.buffer.mul_(1 / bucket.divisor)
        if shards.numel == 0:
            return
        names: list[str] = []
        errors: list[Tensor] = []
        if feedback is not None:
            names = list(compress(bucket.names, shards.are_sharded))
            errors = list(compress(bucket.with_buffer(values).gradients, shards.are_sharded))
            feedback.add_to(names, errors)
        packed = torch.zeros(shards.packed_numel, dtype=torch.float32, device=values.device)
        pieces, own = shards.cut_packed(packed), shards.own_packed
        copy_all(pieces, shards.packed_of(values))
        await self._sum_through(wire, packed, shards, bucket.group)
        means = shards.packed_of(bucket.buffer)[own]
        copy_all(means, pieces[own])
        if feedback is None:
            return
        # What rounding the mean to the gradients' dtype loses is not delivered either.
        subtract_all(pieces[own], means)
        copy_all(shards.packed_of(values), pieces)
        # Each rank sees only its part of the result, so ranks ask each other whether all of it is finite.
        is_finite = all_finite(packed[shards.segments[shards.rank]])
        verdict = torch.where(is_finite, torch.zeros((), device=packed.device), math.inf)
        await all_reduce(verdict, op=dist.ReduceOp.SUM, group=bucket.group)
        feedback.hold(names, errors, verdict)

    async def _sum_through(self, wire: Wire, packed: Tensor, shards: BucketShards, group: dist.ProcessGroup) -> None:
        """Make this rank's segment of ``packed`` the sum over ranks; with error feedback the others' segments become
        their rounding errors."""
        rank, numels = shards.rank, shards.segment_numels
        codecs = list(map(wire.codec, numels))
        lengths = [codec.message_bytes for codec in codecs]
        sent = torch.empty(sum(lengths), dtype=torch.uint8, device=packed.device)
        generator = self._generator_for(wire, shards)
        # Starting with the next rank, as they are sent.
        for alike in [*_alike(shards, range(rank + 1, len(numels))), *_alike(shards, range(rank))]:
            codec = codecs[alike.start]
            encode = codec.encode_rows if self._feedback is None else codec.subtract_rows
            encode(_rows(packed, numels, alike), _rows(sent, lengths, alike), generator)
        received = torch.empty(len(numels), lengths[rank], dtype=torch.uint8, device=packed.device)
        await all_to_all(received.unbind(), sent.split_with_sizes(lengths), group=group, label="reduce_scatter")
        own = packed[shards.segments[rank]]
        own.copy_(sum_in_order(codecs[rank], own, received, rank))

    async def _gather_through(self, wire: Wire, shards: BucketShards, group: dist.ProcessGroup) -> None:
        """Add to the parameters their differences from the owners' true weights, as the wire rounds them."""
        rank, numels, device = shards.rank, shards.segment_numels, shards.like.device
        codecs = list(map(wire.codec, numels))
        lengths = [codec.message_bytes for codec in codecs]
        messages = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
        of_rank = messages.split_with_sizes(lengths)
        packed = torch.zeros(shards.packed_numel, dtype=torch.float32, device=device)
        pieces = shards.cut_packed(packed)
        owning = [shard for shard in shards.owned if shard.range[0] < shard.range[1]]
        for shard, piece in zip(owning, pieces[shards.own_packed], strict=True):
            shard.write_difference(piece)
        codecs[rank].encode(packed[shards.segments[rank]], of_rank[rank], self._generator_for(wire, shards))
        if self._is_collective(shards):
            await all_gather(messages, of_rank[rank], group=group)
        else:
            await all_to_all(of_rank, [of_rank[rank]] * len(numels), group=group, label="all_gather")
        for alike in _alike(shards, shards.ranks):
            codecs[alike.start].decode_rows(_rows(messages, lengths, alike), _rows(packed, numels, alike))
        add_all(shards.parameter_pieces, pieces)

    @property
    def _feedback(self) -> ErrorFeedback | None:
        return None if self.memory is None else self.memory.feedback

    def _generator_for(self, wire: Wire, shards: BucketShards) -> torch.Generator | None:
        assert self.memory is not None, "wires have a memory"
        return self.memory.generator_for(wire, shards.rank, shards.like.device)


def _alike(shards: BucketShards, ranks: range) -> Iterator[range]:
    """``ranks`` in runs whose segments are of one length."""
    if shards.is_even:
        yield from [ranks] if ranks else []
    else:
        yield from (range(rank, rank + 1) for rank in ranks)


def _rows(flat: Tensor, lengths: Sequence[int], ranks: range) -> Tensor:
    """The parts of ``ranks``, which are alike, in a flat buffer of parts of these lengths."""
    start, length = sum(lengths[: ranks.start]), lengths[ranks.start]
    return flat[start : start + len(ranks) * length].view(len(ranks), length)


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
