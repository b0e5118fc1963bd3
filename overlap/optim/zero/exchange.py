"""Gradients on their way to their owners, and new parameters on their way to all ranks.

Per bucket of N elements a rank sends N (W-1)/W in the reduction and as much in the gather, together as much as one
all-reduce sends; of whole parameters that holds for the sum of all buckets.

[Note: messages]

A large piece is sent from its own memory and, in the gather, received in the memory where it belongs, so it is never
copied: on a CPU all copies compete for memory bandwidth, and workspace would cost more than dividing the state saves.
Small pieces share one message, since each message has a cost of its own. Sender and receiver use the same order: large
pieces first, then the small ones. Where the device has streams, all pieces for a rank are one message: copying is cheap
there next to sending, and pieces begin anywhere (see [Note: segments] in :mod:`overlap.hooks.segments`).

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
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, compress
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.device import has_streams
from overlap._torch.foreach import add_all, all_finite, copy_all, subtract_from_
from overlap.hooks import Bucket, all_gather, all_reduce, reduce_scatter, send_recv
from overlap.hooks.collectives import add_messages
from overlap.hooks.engine.wavefront import Item
from overlap.hooks.segments import round_up, segment_multiple
from overlap.hooks.wires import ErrorFeedback, Wire
from overlap.hooks.wires.blocks import codecs_in_runs
from overlap.hooks.wires.exchange import sum_in_order, swap
from overlap.hooks.wires.feedback import StageMemory
from overlap.optim.zero.shards import BucketShards, beginning, beginnings

__all__ = ["Exchange", "Gather", "Workspace"]

# A message costs tens of microseconds, in which about 256 KB can be copied.
_LARGE_NUMEL = 64 * 1024
# Of what all other ranks send; two rows are in memory at a time. See [Note: rows of a sum] in overlap._torch.c10d.
_ROW_BYTES = 2**19


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
    _messages: WeakKeyDictionary[BucketShards, _Messages] = field(default_factory=WeakKeyDictionary, init=False)

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
            if self.sends_directly:
                await self._reduce_by_messages(bucket.buffer, shards, bucket.group)
            else:
                is_alone = bucket.index == 0 and bucket.is_last
                for part, place in shards.in_turn if is_alone else [(shards, slice(None))]:
                    reduce = self._reduce_scatter if part.is_even else self._reduce_by_messages
                    await reduce(bucket.buffer[place], part, bucket.group)
        if rest := shards.rest(bucket.buffer):
            flat = torch.cat(rest)
            await all_reduce(flat, op=dist.ReduceOp.SUM, group=bucket.group)
            copy_all(rest, flat.split_with_sizes([part.numel() for part in rest]))
            self._note(rest)

    async def gather(self, shards: BucketShards, group: dist.ProcessGroup) -> None:
        """Send the part of the parameters that each rank owns to all ranks, which changes the parameters."""
        if shards.packed_numel == 0:
            return
        if self.gather_wire is not None:
            await self._gather_through(self.gather_wire, shards, group)
        elif self.sends_directly or not shards.is_even:
            await self._gather_by_messages(shards, group)
        else:
            await self._all_gather(shards, group)
        shards.note_written()

    def _note(self, means: Sequence[Tensor]) -> None:
        """``means`` are of gradients that are not sharded: where they are not finite, the pass is not applied, so it
        may not change the memory of the wire either."""
        if (feedback := self._feedback) is not None:
            for mean in means:
                feedback.note(mean)

    # By collectives of equal segments ----------------------------------------------------------------------

    async def _reduce_scatter(self, flat: Tensor, shards: BucketShards, group: dist.ProcessGroup) -> None:
        if not shards.packed_numel:
            return
        room = self.workspace.take(shards.packed_numel, flat)
        packed = room[: shards.packed_numel]
        pieces, packed_pieces = shards.cut_flat(flat), shards.cut_packed(packed)
        copy_all(packed_pieces, pieces)
        await reduce_scatter(packed[shards.segment], packed, group=group)
        copy_all(shards.own_of(pieces), shards.own_of(packed_pieces))
        self.workspace.give(room)

    async def _all_gather(self, shards: BucketShards, group: dist.ProcessGroup) -> None:
        room = self.workspace.take(shards.packed_numel, shards.parameter_pieces[0])
        packed = room[: shards.packed_numel]
        pieces = shards.cut_packed(packed)
        copy_all(shards.own_of(pieces), shards.own_of(shards.parameter_pieces))
        await all_gather(packed, packed[shards.segment], group=group)
        copy_all(shards.others_of(shards.parameter_pieces), shards.others_of(pieces))
        self.workspace.give(room)

    # By messages, as in [Note: messages] ---------------------------------------------------------------------

    async def _reduce_by_messages(self, flat: Tensor, shards: BucketShards, group: dist.ProcessGroup) -> None:
        """Add the other ranks' gradients to the part of ``flat`` that this rank owns, in the order of ranks."""
        if not shards.packed_numel:
            return
        messages = self._messages.get(shards) or self._messages.setdefault(shards, _Messages(shards))
        pieces, room = shards.cut_flat(flat), self.workspace.take(messages.room_numel, flat)
        boxes = list(map(room.__getitem__, messages.boxes))
        sends: list[tuple[Tensor, int]] = []
        for peer in messages.peers:
            sends += [(message, peer) for message in messages.of[peer].pack(pieces, boxes[peer])]
        await add_messages(sends, messages.of[shards.rank].rows(pieces), group=group)
        self.workspace.give(room)

    async def _gather_by_messages(self, shards: BucketShards, group: dist.ProcessGroup) -> None:
        messages = self._messages.get(shards) or self._messages.setdefault(shards, _Messages(shards))
        room = self.workspace.take(messages.room_numel, shards.parameter_pieces[0])
        boxes = list(map(room.__getitem__, messages.boxes))
        own, box, sends = messages.of[shards.rank], boxes[shards.rank], messages.sends
        if own.small_parameters:
            copy_all(box.split_with_sizes(own.small_numels), own.small_parameters)
            sends = [*sends, *[(box, peer) for peer in messages.peers]]
        small = [peer for peer in messages.peers if messages.packed_numels[peer]]
        receives = [*messages.receives, *[(boxes[peer], peer) for peer in small]]
        await send_recv(sends, receives, group=group, label="all_gather")
        for peer in small:
            other = messages.of[peer]
            copy_all(other.small_parameters, boxes[peer].split_with_sizes(other.small_numels))
        self.workspace.give(room)

    # Through wires, as in [Note: wires of a sharded update] --------------------------------------------------

    async def _reduce_through(self, wire: Wire, bucket: Bucket, shards: BucketShards) -> None:
        """As :meth:`reduce`, but parameters that are not sharded are only divided."""
        feedback = self._feedback
        values = bucket.buffer.to(torch.float32, copy=feedback is not None).mul_(1 / bucket.divisor)
        if values is not bucket.buffer:
            bucket.buffer.mul_(1 / bucket.divisor)
        if shards.packed_numel == 0:
            return
        names: list[str] = []
        errors: list[Tensor] = []
        if feedback is not None:
            names = list(compress(bucket.names, shards.are_sharded))
            errors = list(compress(bucket.with_buffer(values).gradients, shards.are_sharded))
            feedback.add_to(names, errors)
        flat = shards.cut_flat(values)
        pieces = [flat[own] for own in shards.of_rank]
        mean = await self._sum_through(wire, pieces, shards, bucket.group)
        own = shards.own_of(shards.cut_flat(bucket.buffer))
        copy_all(own, beginning(mean, own))
        if feedback is None:
            return
        # What rounding the mean to the gradients' dtype loses is not delivered either.
        copy_all(pieces[shards.rank], own)
        subtract_from_(pieces[shards.rank], beginning(mean, own))
        # Each rank sees only its part of the result, so ranks ask each other whether all of it is finite.
        verdict = torch.zeros((), device=bucket.buffer.device)
        if own:
            verdict = torch.where(torch.stack([all_finite(piece) for piece in own]).all(), verdict, math.inf)
        await all_reduce(verdict, op=dist.ReduceOp.SUM, group=bucket.group)
        feedback.hold(names, errors, verdict)

    async def _sum_through(
        self, wire: Wire, pieces: Sequence[Sequence[Tensor]], shards: BucketShards, group: dist.ProcessGroup
    ) -> Tensor:
        """The sum over ranks of this rank's part, fp32, packed; with error feedback the other ranks' ``pieces`` become
        their rounding errors."""
        device, rank, ranks = shards.parameter_pieces[0].device, shards.rank, len(pieces)
        generator = self._generator_for(wire, shards)
        codecs = [wire.codec(numel) if numel else None for numel in shards.owned_numels]
        messages = [torch.empty(0, dtype=torch.uint8, device=device)] * ranks
        # Starting with the next rank, as they are sent.
        peers = [(rank + distance) % ranks for distance in range(1, ranks)]
        for codec, alike in codecs_in_runs(codecs, peers, device):
            encoded = torch.empty(len(alike), codec.message_bytes, dtype=torch.uint8, device=device)
            parts = [pieces[peer] for peer in alike]
            summands = _packed(parts, codec.numel, device)
            if self._feedback is None:
                codec.encode_rows(summands, encoded, generator)
            else:
                codec.subtract_rows(summands, encoded, generator)
                copy_all(list(chain.from_iterable(parts)), beginnings(summands, parts))
            for peer, message in zip(alike, encoded, strict=True):
                messages[peer] = message
        own = codecs[rank]
        received = torch.empty(ranks, own.message_bytes if own else 0, dtype=torch.uint8, device=device)
        await swap(messages, received, group=group, label="reduce_scatter")
        if own is None:
            return torch.empty(0, device=device)
        return sum_in_order(own, _packed([pieces[rank]], own.numel, device)[0], received, rank)

    async def _gather_through(self, wire: Wire, shards: BucketShards, group: dist.ProcessGroup) -> None:
        """Add to the parameters their differences from the owners' true weights, as the wire rounds them."""
        device, rank = shards.parameter_pieces[0].device, shards.rank
        codecs = [wire.codec(numel) if numel else None for numel in shards.gathered_numels]
        lengths = [0 if codec is None else codec.message_bytes for codec in codecs]
        space = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
        messages = space.split_with_sizes(lengths)
        pieces = [shards.parameter_pieces[own] for own in shards.of_rank]
        if (codec := codecs[rank]) is not None:
            differences = torch.zeros(codec.numel, dtype=torch.float32, device=device)
            for shard, part in zip(shards.owning, beginning(differences, pieces[rank]), strict=True):
                shard.write_difference(part)
            codec.encode(differences, messages[rank], self._generator_for(wire, shards))
        if shards.is_even and not self.sends_directly:
            await all_gather(space, messages[rank], group=group)
        else:
            await swap([messages[rank]] * len(messages), messages, group=group, label="all_gather")
        for codec, alike in codecs_in_runs(codecs, range(len(codecs)), device):
            start, end = sum(lengths[: alike[0]]), sum(lengths[: alike[-1] + 1])
            decoded = torch.empty(len(alike), codec.numel, dtype=torch.float32, device=device)
            codec.decode_rows(space[start:end].view(len(alike), -1), decoded)
            changed = [pieces[peer] for peer in alike]
            add_all(list(chain.from_iterable(changed)), beginnings(decoded, changed))

    @property
    def _feedback(self) -> ErrorFeedback | None:
        return None if self.memory is None else self.memory.feedback

    def _generator_for(self, wire: Wire, shards: BucketShards) -> torch.Generator | None:
        assert self.memory is not None, "wires have a memory"
        return self.memory.generator_for(wire, shards.rank, shards.parameter_pieces[0].device)


def _packed(pieces: Sequence[Sequence[Tensor]], numel: int, device: torch.device) -> Tensor:
    """A row of ``numel`` values for each of ``pieces``: one after another, with zeros at the end."""
    rows = torch.empty(len(pieces), numel, dtype=torch.float32, device=device)
    rows[:, min(sum(piece.numel() for piece in own) for own in pieces) :].zero_()
    copy_all(beginnings(rows, pieces), list(chain.from_iterable(pieces)))
    return rows


class _Messages:
    """The messages of one bucket, in both directions. See [Note: messages]."""

    def __init__(self, shards: BucketShards) -> None:
        self.of = [_Pieces(shards, range(own.start, own.stop)) for own in shards.of_rank]
        """The pieces of each rank."""
        self.packed_numels = [sum(own.small_numels) for own in self.of]
        """The elements of the small pieces of each rank, packed."""
        multiple = segment_multiple(shards.parameter_pieces[0].device)
        rooms = [round_up(numel, multiple) for numel in self.packed_numels]
        self.room_numel = sum(rooms)
        starts = [0, *accumulate(rooms)]
        self.boxes = [slice(start, start + numel) for start, numel in zip(starts, self.packed_numels, strict=False)]
        """Where the small pieces of each rank are packed. See [Note: segments] in :mod:`overlap.hooks.segments`."""
        self.peers = [rank for rank in shards.ranks if rank != shards.rank]
        # In a gather, from and to the parameters' own memory.
        self.sends = [(piece, peer) for peer in self.peers for piece in self.of[shards.rank].large_parameters]
        self.receives = [(piece, peer) for peer in self.peers for piece in self.of[peer].large_parameters]


class _Pieces:
    """The pieces of one rank, at these ``places`` of the packed order: the large ones travel by themselves, the small
    ones packed together."""

    def __init__(self, shards: BucketShards, places: Sequence[int]) -> None:
        like, numels = shards.parameter_pieces[0], [piece.numel() for piece in shards.parameter_pieces]
        on_streams = has_streams(like.device)
        self._large = [place for place in places if numels[place] >= _LARGE_NUMEL and not on_streams]
        self._small = [place for place in places if place not in self._large]
        self.small_numels = [numels[place] for place in self._small]
        self.large_parameters = [shards.parameter_pieces[place] for place in self._large]
        self.small_parameters = [shards.parameter_pieces[place] for place in self._small]
        # In a reduction a message is a row of a sum (see [Note: rows of a sum] in overlap._torch.c10d), or a part of a
        # large piece of as many elements.
        others = max(1, len(shards.ranks) - 1)
        by_memory = max(_LARGE_NUMEL, _ROW_BYTES // others // like.element_size())
        self._row_numel = shards.packed_numel if on_streams else by_memory
        self._rows: list[list[int]] = []
        self._row_numels: list[int] = []
        for place in self._small:
            if not self._rows or self._row_numels[-1] + numels[place] > self._row_numel:
                self._rows.append([])
                self._row_numels.append(0)
            self._rows[-1].append(place)
            self._row_numels[-1] += numels[place]

    def pack(self, pieces: Sequence[Tensor], box: Tensor) -> list[Tensor]:
        """The messages of a sum, the small pieces copied to ``box``."""
        messages = [part for place in self._large for part in pieces[place].split(self._row_numel)]
        if self._small:
            copy_all(box.split_with_sizes(self.small_numels), [pieces[place] for place in self._small])
            messages += box.split_with_sizes(self._row_numels)
        return messages

    def rows(self, pieces: Sequence[Tensor]) -> list[list[Tensor]]:
        """The pieces, or parts of one, that each of the messages of a sum is added to."""
        large = [[part] for place in self._large for part in pieces[place].split(self._row_numel)]
        return [*large, *[[pieces[place] for place in row] for row in self._rows]]


class Workspace:
    """Flat buffers, kept from bucket to bucket and step to step.

    On a CPU the first use of fresh memory takes longer than the copy into it. Accelerators have a caching allocator,
    which also knows about streams.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._keeps = True

    def take(self, numel: int, like: Tensor) -> Tensor:
        """A flat tensor of at least ``numel`` elements with undefined values, of the dtype and device of ``like``."""
        self._keeps = not has_streams(like.device)
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
        if self._keeps:
            self._free.append(buffer)

    def trim(self) -> None:
        """Free the buffers that are not in use, before buckets of other sizes."""
        self._free.clear()
