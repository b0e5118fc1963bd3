"""Gradients on their way to their owners, and new parameters on their way to all ranks.

Per bucket of N elements a rank sends N (W-1)/W in the reduction and as much in the gather, together as much as one
all-reduce sends; of whole parameters that holds for the sum of all buckets. What a rank does for it, but for what it
sends and receives, does not depend on W.

[Note: chunks]

Where the device has streams, the chunks of all parameters are packed by one operator, as rows of one length for each
rank, and one collective sends the rows (see [Note: segments] in :mod:`overlap.hooks.segments`). Rows are unpacked by
one operator, too, and by one more for parameters whose last chunks are short. A bucket of one parameter whose chunks
are such rows already is sent in place. Whole parameters are sent from their own memory, all of a bucket as one group of
reductions, or of broadcasts: rows that are as long as the longest would be sent mostly empty.

[Note: messages]

On a CPU a large piece is sent from its own memory and, in the gather, received in the memory where it belongs, so it is
never copied: all copies compete for memory bandwidth, and workspace would cost more than dividing the state saves.
Small pieces are packed, since each message has a cost of its own. Gloo's own reduce-scatter sends as much as an
all-reduce, and its all-gather copies the result.

[Note: parts of a gather]

A bucket of 25 MB takes a fifth of a second on a link of 1 Gbit/s, for which a forward would wait for its first layer.
So a gather during the next forward is cut between parameters, the bucket's last ones first, which the forward needs
first, into parts that are large next to the cost of a message. Whole parameters are not parted, since one rank would
send each part and the links of the others rest. Parts depend on the sizes of the parameters alone, so they are the same
on every rank.

[Note: reduced in turn]

A collective needs a packed copy of the bucket. DDP's first pass has one bucket of the whole model, and that copy would
be the largest of the run. So a single large bucket is reduced in parts, one after another; where other buckets follow,
the link would rest between parts. For messages see [Note: rows of a sum] in :mod:`overlap._torch.c10d`. Gathers without
a stage, which know no buckets, have the same parts.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.device import has_streams
from overlap._torch.foreach import copy_all
from overlap.hooks import Bucket, all_gather, all_reduce, reduce_scatter, send_recv
from overlap.hooks.collectives import Operation, add_messages, broadcast_each, reduce_each
from overlap.hooks.engine.wavefront import BackgroundTask
from overlap.hooks.segments import can_be_sent, round_up, segment_multiple
from overlap.hooks.stage import Plan, follow
from overlap.optim.zero.shards import Shard

# A message costs tens of microseconds, in which about 256 KB can be copied.
_LARGE_NUMEL = 64 * 1024
# Of the messages of all other ranks in one row; two rows are in memory at a time. See [Note: rows of a sum] in
# overlap._torch.c10d.
_ROW_BYTES = 2**19
_LEAST_BYTES = 2**20
# Networks of accelerators are a hundred times as fast, and a launch of theirs takes as long as a message of a CPU.
_LEAST_BYTES_ON_STREAMS = 2**26
# Of DDP's buckets by default; on accelerators they are often given more.
_AT_ONCE_BYTES = 25 * 2**20
_AT_ONCE_BYTES_ON_STREAMS = 2**28


class BucketShards:
    """The parameters of a bucket and their chunks.

    *Flat* is a buffer of parameter after parameter, as DDP's bucket. *Packed* has a row for each rank, of its chunks of
    all sharded parameters that are divided: see [Note: chunks].

    Args:
        shards: of each parameter of the bucket; ``None`` of one that is not sharded.
        numels: of each parameter.
    """

    def __init__(self, shards: Sequence[Shard | None], numels: Sequence[int]) -> None:
        self._by_place, self._numels = shards, list(numels)
        self._shards = [shard for shard in shards if shard is not None]
        first = self._shards[0]
        self.rank, self.ranks, self.on_streams = first.rank, first.ranks, first.on_streams
        self.numel = sum(shard.parameter.numel() for shard in self._shards)
        """How many elements the sharded parameters have."""
        self.flats = [shard.flat for shard in self._shards]
        """The sharded parameters' own memory."""
        self.own_parameters = [shard.parameter for shard in self._shards if shard.own is not None]
        """Those of which this rank's optimizer has a part, which may be empty."""
        # Where this rank's part of each parameter is in a flat buffer, and parameters that are not sharded.
        self._own_slices: list[slice | None] = []
        self._rest_slices: list[slice] = []
        for shard, start, numel in zip(shards, itertools.accumulate(numels, initial=0), numels, strict=False):
            own = None if shard is None else slice(start + shard.range[0], start + shard.range[1])
            self._own_slices.append(own)
            if own is None:
                self._rest_slices.append(slice(start, start + numel))
        self._owned_slices = [
            own for own, shard in zip(self._own_slices, shards, strict=True) if own and shard and shard.own is not None
        ]
        # The sharded parameters that are not empty, by their places: those that are divided, and the others.
        present = [(place, shard) for place, shard in enumerate(self._shards) if shard.parameter.numel()]
        self._divided = [(place, shard) for place, shard in present if shard.owner is None]
        self.whole = [(place, shard.owner) for place, shard in present if shard.owner is not None]
        """The places, among the sharded parameters, of those that have one owner, and the owners."""
        # The lengths of the pieces of a row, and of this rank's, padding included. See [Note: chunks].
        self._sizes = [shard.chunk_numel for _, shard in self._divided]
        self._own_sizes: list[int] = []
        for length, (_, shard) in zip(self._sizes, self._divided, strict=True):
            self._own_sizes += [shard.view.numel(), length - shard.view.numel()]
        self._row_numel = round_up(sum(self._sizes), segment_multiple(first.parameter.device))
        self._padding = self._row_numel - sum(self._sizes)
        if self._padding:
            self._sizes.append(self._padding)
            self._own_sizes.append(self._padding)

    def __iter__(self) -> Iterator[Shard]:
        """The shards in the bucket's order, without the parameters that are not sharded."""
        return iter(self._shards)

    def gradients_of_all(self, flat: Tensor) -> list[Tensor]:
        """The gradient of each sharded parameter in a flat buffer."""
        pieces = flat.split_with_sizes(self._numels)
        return [piece for piece, shard in zip(pieces, self._by_place, strict=True) if shard is not None]

    def rest(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat buffer that belong to parameters which are not sharded."""
        return list(map(flat.__getitem__, self._rest_slices))

    def gradients(self, flat: Tensor) -> list[Tensor]:
        """This rank's part of each of :attr:`own_parameters` in a flat buffer of gradients, empty parts included."""
        return list(map(flat.__getitem__, self._owned_slices))

    def means(self, flat: Tensor) -> tuple[Tensor | None, ...]:
        """This rank's part of each parameter in ``flat``, where it has the mean; ``None`` of one that is not
        sharded."""
        return tuple([None if own is None else flat[own] for own in self._own_slices])

    # On streams: see [Note: chunks]. `tensors` are the flat memory of the sharded parameters, or of their gradients.

    @property
    def are_divided(self) -> bool:
        """Whether some of the parameters are, so that there are chunks."""
        return bool(self._divided)

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """Room for packed chunks, ``tensors`` themselves if they are such."""
        like = tensors[self._divided[0][0]]
        if len(self._divided) == 1 and like.numel() == self.ranks * self._row_numel and can_be_sent(like):
            return like.view(self.ranks, self._row_numel)
        return like.new_empty(self.ranks, self._row_numel)

    def _are_in(self, rows: Tensor, tensors: Sequence[Tensor]) -> bool:
        return rows.data_ptr() == tensors[self._divided[0][0]].data_ptr()

    def pack(self, tensors: Sequence[Tensor], rows: Tensor) -> None:
        """Copy the chunks of all ranks to ``rows``."""
        if not self._are_in(rows, tensors):
            padding = [rows.new_empty(self.ranks * self._padding)] if self._padding else []
            chunks = [*(tensors[place] for place, _ in self._divided), *padding]
            torch._chunk_cat(chunks, dim=0, num_chunks=self.ranks, out=rows)

    def own_chunks(self, tensors: Sequence[Tensor], rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's chunks of ``tensors``, and their places in ``rows``; none where these are the same."""
        if self._are_in(rows, tensors):
            return [], []
        chunks = [tensors[place][slice(*shard.range)] for place, shard in self._divided]
        return chunks, list(rows[self.rank].split_with_sizes(self._own_sizes)[: 2 * len(chunks) : 2])

    def unpack(self, rows: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy the chunks of all ranks from ``rows``."""
        if self._are_in(rows, tensors):
            return
        chunks, short, rooms = [], [], []
        for (place, _), length in zip(self._divided, self._sizes, strict=False):
            tensor = tensors[place]
            if tensor.numel() != self.ranks * length:
                short.append(tensor)
                room = rows.new_empty(self.ranks * length)
                rooms.append(room[: tensor.numel()])
                tensor = room
            chunks.append(tensor.view(self.ranks, length))
        if self._padding:
            chunks.append(rows.new_empty(self.ranks, self._padding))
        torch.split_with_sizes_copy(rows, self._sizes, dim=1, out=chunks)
        copy_all(short, rooms)

    # As messages: see [Note: messages].

    def by_owner(self, tensors: Sequence[Tensor]) -> dict[int, tuple[list[Tensor], list[Tensor]]]:
        """The parts of ``tensors`` that each rank owns, large and small ones."""
        found: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        parts: list[tuple[int, Tensor]] = []
        for place, owner in self.whole:
            parts.append((owner, tensors[place]))
        for place, shard in self._divided:
            parts += enumerate(tensors[place].split(shard.chunk_numel))
        for owner, part in parts:
            found.setdefault(owner, ([], []))[part.numel() < _LARGE_NUMEL].append(part)
        return found

    # In parts.

    @cached_property
    def parts(self) -> list[BucketShards]:
        """The bucket in parts, the last parameters first. See [Note: parts of a gather]."""
        if self.whole:
            return [self]
        return [part for part, _ in self._cut(_LEAST_BYTES_ON_STREAMS if self.on_streams else _LEAST_BYTES)]

    @cached_property
    def first_pass_chunks(self) -> list[tuple[BucketShards, slice]]:
        """The bucket in parts with their places in a flat buffer. See [Note: reduced in turn]."""
        return self._cut(_AT_ONCE_BYTES_ON_STREAMS if self.on_streams else _AT_ONCE_BYTES)

    def _cut(self, least_bytes: int) -> list[tuple[BucketShards, slice]]:
        sizes_bytes = [0 if shard is None else shard.parameter.nbytes for shard in self._by_place]
        places = parts_by_need(sizes_bytes, least_bytes)
        if len(places) == 1:
            return [(self, slice(None))]
        starts = [0, *itertools.accumulate(self._numels)]
        return [
            (BucketShards(self._by_place[some], self._numels[some]), slice(starts[some.start], starts[some.stop]))
            for some in places
        ]


def parts_by_need(sizes_bytes: Sequence[int], least_bytes: int) -> list[slice]:
    """The parts of a bucket whose parameters have these sizes, the last ones first, each as small as it can be with at
    least ``least_bytes``.

    >>> parts_by_need([10, 1, 1, 30, 2, 2], least_bytes=4)
    [slice(4, 6, None), slice(3, 4, None), slice(0, 3, None)]
    """
    parts: list[slice] = []
    end, part_bytes = len(sizes_bytes), 0
    for place in reversed(range(len(sizes_bytes))):
        part_bytes += sizes_bytes[place]
        if part_bytes >= least_bytes:
            parts.append(slice(place, end))
            end, part_bytes = place, 0
    if end:
        last = parts.pop() if parts else slice(0, end)
        parts.append(slice(0, last.stop))
    return parts


def in_elements(bucket: Bucket) -> Bucket:
    """``bucket`` with a complex buffer if its gradients are complex; DDP's holds pairs of real numbers.

    A shard's elements are those of its parameter.
    """
    if bucket.parameters[0].is_complex() and not bucket.buffer.is_complex():
        return replace(bucket, buffer=torch.view_as_complex(bucket.buffer.view(-1, 2)))
    return bucket


def reduced(bucket: Bucket, shards: BucketShards | None) -> Bucket:
    """``bucket`` after the reduction of ``shards``, as the next stage sees it."""
    if shards is None:
        return replace(bucket, is_mean=True, owned=None)
    owned = shards.means(in_elements(bucket).buffer)
    if not bucket.buffer.is_complex():
        owned = tuple([torch.view_as_real(p).view(-1) if p is not None and p.is_complex() else p for p in owned])
    return replace(bucket, is_mean=True, owned=owned)


@dataclass(frozen=True, eq=False, kw_only=True)
class Gather(BackgroundTask):
    """Bringing the parameters of one bucket to all ranks, as a piece of background work."""

    shards: BucketShards


def _each(
    operation: Callable[..., Operation], tensors: Sequence[Tensor], shards: BucketShards, group: dist.ProcessGroup
) -> Plan:
    """``operation`` on each whole tensor and its owner; by a copy of one that a collective does not take as it is."""
    if not shards.whole:
        return ()
    whole, sent = [tensors[place] for place, _ in shards.whole], list[Tensor]()

    def send() -> Operation:
        sent[:] = [one if can_be_sent(one) else one.clone() for one in whole]
        return operation([(one, owner) for one, (_, owner) in zip(sent, shards.whole, strict=True)], group=group)

    def copy() -> None:
        copied = [place for place, one in enumerate(sent) if one is not whole[place]]
        copy_all([whole[place] for place in copied], [sent[place] for place in copied])
        sent.clear()

    return send, copy


class _Share(NamedTuple):
    """What one rank owns of a bucket: see [Note: messages]."""

    messages: list[Tensor]
    """The large parts, and room for the small ones."""
    small: list[Tensor]
    packed: Sequence[Tensor]
    """The places of the small ones in that room."""


class Exchange:
    """How the ranks of a group exchange gradients and parameters."""

    def __init__(self) -> None:
        # Flat buffers, kept from bucket to bucket and step to step: on a CPU the first use of fresh memory takes longer
        # than the copy into it. Accelerators have a caching allocator, which also knows about streams.
        self._free: list[Tensor] = []
        # New buckets are cut on the thread of backward, while the thread of the engine exchanges those before them.
        self._lock = threading.Lock()

    def shards_of(self, parameters: Sequence[Tensor], *known: Mapping[int, Shard]) -> BucketShards | None:
        """The shards of a bucket of these parameters, by ``id`` in any of ``known``; ``None`` if none is sharded."""
        # DDP's first backward has one bucket of all parameters; its large buffers are not kept for smaller ones.
        self.trim()
        found = [next((each[id(p)] for each in known if id(p) in each), None) for p in parameters]
        if all(shard is None for shard in found):
            return None
        return BucketShards(found, [p.numel() for p in parameters])

    async def reduce(self, bucket: Bucket, shards: BucketShards | None) -> None:
        """Make the part of ``bucket.buffer`` that this rank owns the mean; the rest becomes this rank's own gradient,
        divided. Parameters that are not sharded are averaged on every rank: all, where ``shards`` is ``None``."""
        if shards is not None and not shards.on_streams:
            if bucket.divisor != 1:
                bucket.buffer.mul_(1 / bucket.divisor)
            if shards.numel:
                await self._reduce_by_messages(shards.gradients_of_all(bucket.buffer), shards, bucket.group)
            await follow(self._reduce_rest(bucket, shards))
        else:
            await follow(self.reduction(bucket, shards))

    def reduction(self, bucket: Bucket, shards: BucketShards | None) -> Plan:
        """The functions of :meth:`reduce` where there are streams, or nothing is sharded."""
        buffer, factor, group = bucket.buffer, 1 / bucket.divisor, bucket.group
        # As in DDP, each rank divides before the sum, which keeps half precision in range.

        def divide() -> None:
            buffer.mul_(factor)

        plan: list[Callable[[], Operation | None]] = [] if bucket.divisor == 1 else [divide]
        if shards is None:
            return *plan, lambda: all_reduce(buffer, group=group)
        is_alone = bucket.index == 0 and bucket.is_last
        for part, place in shards.first_pass_chunks if is_alone else [(shards, slice(None))]:
            tensors = part.gradients_of_all(buffer[place])
            plan += [*self._reduce_rows(tensors, part, group), *_each(reduce_each, tensors, part, group)]
        return *plan, *self._reduce_rest(bucket, shards)

    def _reduce_rest(self, bucket: Bucket, shards: BucketShards) -> Plan:
        """The mean of the parameters that are not sharded."""
        rest, sent = shards.rest(bucket.buffer), list[Tensor]()

        def send() -> Operation:
            sent.append(torch.cat(rest))
            return all_reduce(sent[0], group=bucket.group)

        def copy() -> None:
            copy_all(rest, sent.pop().split_with_sizes([part.numel() for part in rest]))

        return (send, copy) if rest else ()

    async def gather(self, shards: BucketShards, group: dist.ProcessGroup) -> None:
        """Send the part of the parameters that each rank owns to all ranks, which changes the parameters."""
        if shards.on_streams:
            await follow(self.gathering(shards, group))
        elif shards.numel:
            await self._gather_by_messages(shards.flats, shards, group)

    def gathering(self, shards: BucketShards, group: dist.ProcessGroup) -> Plan:
        """The functions of :meth:`gather` where there are streams."""
        tensors = shards.flats
        return *self._gather_rows(tensors, shards, group), *_each(broadcast_each, tensors, shards, group)

    def _reduce_rows(self, tensors: Sequence[Tensor], shards: BucketShards, group: dist.ProcessGroup) -> Plan:
        """Add the other ranks' gradients to the parts of ``tensors`` that this rank owns."""
        packed: list[Tensor] = []

        def pack() -> Operation:
            packed.append(rows := shards.rows(tensors))
            shards.pack(tensors, rows)
            return reduce_scatter(rows[shards.rank], rows.view(-1), group=group)

        def unpack() -> None:
            copy_all(*shards.own_chunks(tensors, packed.pop()))

        return (pack, unpack) if shards.are_divided else ()

    def _gather_rows(self, tensors: Sequence[Tensor], shards: BucketShards, group: dist.ProcessGroup) -> Plan:
        """Fill the parts of ``tensors`` that other ranks own."""
        packed: list[Tensor] = []

        def pack() -> Operation:
            packed.append(rows := shards.rows(tensors))
            chunks, places = shards.own_chunks(tensors, rows)
            copy_all(places, chunks)
            return all_gather(rows.view(-1), rows[shards.rank], group=group)

        def unpack() -> None:
            shards.unpack(packed.pop(), tensors)

        return (pack, unpack) if shards.are_divided else ()

    async def _reduce_by_messages(
        self, tensors: Sequence[Tensor], shards: BucketShards, group: dist.ProcessGroup
    ) -> None:
        """As :meth:`_reduce_rows`."""
        room, shares = self._shares(tensors, shards)
        for share in shares.values():
            copy_all(share.packed, share.small)
        # See [Note: rows of a sum] in overlap._torch.c10d.
        row_numel = max(_LARGE_NUMEL, _ROW_BYTES // max(1, shards.ranks - 1) // room.element_size())
        own = shares.pop(shards.rank, None)
        sends = [
            (row, owner)
            for owner, share in shares.items()
            for message in share.messages
            for row in message.split(row_numel)
        ]
        targets = [] if own is None else [(row,) for message in own.messages for row in message.split(row_numel)]
        await add_messages(sends, targets, group=group)
        if own is not None:
            copy_all(own.small, own.packed)
        self._give(room)

    async def _gather_by_messages(
        self, tensors: Sequence[Tensor], shards: BucketShards, group: dist.ProcessGroup
    ) -> None:
        """As :meth:`_gather_rows`."""
        room, shares = self._shares(tensors, shards)
        sends: list[tuple[Tensor, int]] = []
        if (own := shares.pop(shards.rank, None)) is not None:
            copy_all(own.packed, own.small)
            peers = (*range(shards.rank), *range(shards.rank + 1, shards.ranks))
            sends = list(itertools.product(own.messages, peers))
        receives = [(message, owner) for owner, share in shares.items() for message in share.messages]
        await send_recv(sends, receives, group=group, label="all_gather")
        for share in shares.values():
            copy_all(share.small, share.packed)
        self._give(room)

    def _shares(self, tensors: Sequence[Tensor], shards: BucketShards) -> tuple[Tensor, dict[int, _Share]]:
        """What each rank owns of ``tensors``, and the room that they share."""
        found = shards.by_owner(tensors)
        numels = [list(map(Tensor.numel, small)) for _, small in found.values()]
        sizes = list(map(sum, numels))
        room, shares = self._take(sum(sizes), tensors[0]), {}
        rooms = room[: sum(sizes)].split_with_sizes(sizes)
        for (owner, (large, small)), part, of_small in zip(found.items(), rooms, numels, strict=True):
            shares[owner] = _Share([*large, part] if small else large, small, part.split_with_sizes(of_small))
        return room, shares

    def _take(self, numel: int, like: Tensor) -> Tensor:
        """A flat tensor of at least ``numel`` elements with undefined values, of the dtype and device of ``like``."""
        # The smallest that is large enough; or else a larger one replaces the largest, so there are never more than
        # were in use at once.
        found, taken = torch.empty(0, dtype=like.dtype, device=like.device), -1
        with self._lock:
            for place, kept in enumerate(self._free):
                size, best = kept.numel(), found.numel()
                if kept.dtype == like.dtype and (best < size if best < numel else numel <= size < best):
                    found, taken = kept, place
            if taken >= 0:
                del self._free[taken]
        return found if found.numel() >= numel else torch.empty(numel, dtype=like.dtype, device=like.device)

    def _give(self, buffer: Tensor) -> None:
        """Take back a buffer."""
        if not has_streams(buffer.device):
            self._free.append(buffer)

    def trim(self) -> None:
        """Free the buffers that are not in use, before buckets of other sizes."""
        with self._lock:
            self._free.clear()
