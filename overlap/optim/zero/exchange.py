"""Gradients on their way to their owners, and new parameters on their way to all ranks.

Per bucket of N elements a rank sends N (W-1)/W in the reduction and as much in the gather, together as much as one
all-reduce sends; of whole parameters that holds for the sum of all buckets. The work of a rank, but for
sending and receiving, does not depend on W. Both are plans: functions with a collective between them.

[Note: chunks]

Where the device has streams, the chunks of all parameters are packed by one operator, as rows of one length for each
rank, and one collective sends the rows (see [Note: segments] in :mod:`overlap.hooks.segments`). Rows are unpacked by
one operator, too, and by one more for parameters whose last chunks are short. A bucket of one parameter whose chunks
are such rows already is sent in place. Whole parameters are sent from their own memory, all of a bucket as one group of
reductions, or of broadcasts: rows that are as long as the longest would be sent mostly empty.

[Note: messages]

On a CPU a large piece is sent from its own memory and received, or added, where it belongs, so it is never copied: all
copies compete for memory bandwidth. Small pieces travel together, since each message has a cost of its own. Gloo's own
reduce-scatter sends as much as an all-reduce, and its all-gather copies the result.

[Note: parts of a bucket]

A bucket of 25 MB takes a fifth of a second on a link of 1 Gbit/s, for which a forward would wait for its first layer.
So a gather during the next forward is cut between parameters, the bucket's last ones first, which the forward needs
first, into parts that are large next to the cost of a message. Whole parameters are not parted, since one rank would
send each part and the links of the others rest. Parts depend on the sizes of the parameters alone, so they are the same
on every rank. DDP's first pass has one bucket of the whole model, and a packed copy of it would be the largest of the
run: it is reduced in parts, one after another, and gathers without a stage, which know no buckets, have them, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.foreach import copy_all
from overlap.hooks import Bucket, all_gather, all_reduce, reduce_scatter, send_recv
from overlap.hooks.collectives import Operation, add_messages, broadcast_each, reduce_each
from overlap.hooks.engine.wavefront import BackgroundTask
from overlap.hooks.segments import can_be_sent, round_up, segment_multiple
from overlap.hooks.stage import Plan
from overlap.hooks.wires import Codec, Wire
from overlap.optim.zero.shards import Shard

# A message costs tens of microseconds, in which about 256 KB can be copied.
_LARGE_NUMEL = 64 * 1024
# Of the messages of all other ranks in one row; two rows are in memory at a time. See [Note: rows of a sum] in
# overlap._torch.c10d.
_ROW_BYTES = 2**19
_LEAST_BYTES = 2**20
# Networks of accelerators are a hundred times as fast, and a launch of theirs takes as long as a message of a CPU.
_LEAST_BYTES_ON_STREAMS = 2**26


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
        # Where this rank's part of each parameter is in a flat buffer; none of one that is not sharded.
        self._own_slices = [
            None if shard is None else slice(start + shard.range[0], start + shard.range[1])
            for shard, start in zip(shards, itertools.accumulate(numels, initial=0), strict=False)
        ]
        present = [(place, shard) for place, shard in enumerate(self._shards) if shard.parameter.numel()]
        self.divided = [(place, shard) for place, shard in present if shard.owner is None]
        """The sharded parameters that are not empty and are divided, by their places."""
        self.whole = [(place, shard.owner) for place, shard in present if shard.owner is not None]
        """The places, among the sharded parameters, of those that have one owner, and the owners."""
        self.sizes = [shard.chunk_numel for _, shard in self.divided]
        """The lengths of the pieces of a row, padding included. See [Note: chunks]."""
        self.row_numel = round_up(sum(self.sizes), segment_multiple(first.parameter.device))
        self.padding = self.row_numel - sum(self.sizes)
        if self.padding:
            self.sizes.append(self.padding)
        self.codec: Codec | None = None
        """Of a rank's row, where parameters are gathered through a wire."""
        self._rows: Rows | None = None

    def __iter__(self) -> Iterator[Shard]:
        """The shards in the bucket's order, without the parameters that are not sharded."""
        return iter(self._shards)

    def gradients_of_all(self, flat: Tensor) -> list[Tensor]:
        """The gradient of each sharded parameter in a flat buffer."""
        pieces = flat.split_with_sizes(self._numels)
        return [piece for piece, shard in zip(pieces, self._by_place, strict=True) if shard is not None]

    def rest(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat buffer that belong to parameters which are not sharded."""
        pieces = flat.split_with_sizes(self._numels)
        return [piece for piece, shard in zip(pieces, self._by_place, strict=True) if shard is None]

    def gradients(self, flat: Tensor) -> list[Tensor]:
        """This rank's part of each of :attr:`own_parameters` in a flat buffer of gradients, empty parts included."""
        each = zip(self._own_slices, self._by_place, strict=True)
        return [flat[own] for own, shard in each if own is not None and shard is not None and shard.own is not None]

    def means(self, flat: Tensor) -> tuple[Tensor | None, ...]:
        """This rank's part of each parameter in ``flat``, where it has the mean; ``None`` of one that is not
        sharded."""
        return tuple([None if own is None else flat[own] for own in self._own_slices])

    def pack_masters(self, row: Tensor) -> None:
        """Copy the masters of this rank's chunks to its ``row``."""
        each = zip(self.divided, row.split_with_sizes(self.sizes), strict=False)
        masters = [(own.detach().view(-1), piece) for (_, shard), piece in each if (own := shard.own) is not None]
        copy_all([piece[: own.numel()] for own, piece in masters], [own for own, _ in masters])

    def note_published(self) -> None:
        """Keep this rank's chunks as they are in the parameters, which masters do not round to."""
        for _, shard in self.divided:
            if shard.published is None:
                shard.published = torch.empty_like(shard.view)
        published = [(one, shard.view) for _, shard in self.divided if (one := shard.published) is not None]
        copy_all([one for one, _ in published], [view for _, view in published])

    def messages(self, tensors: Sequence[Tensor]) -> dict[int, list[list[Tensor]]]:
        """The parts of ``tensors`` that each rank owns, as they travel: large ones alone, small ones together. See
        [Note: messages]."""
        parts = [(owner, tensors[place]) for place, owner in self.whole]
        for place, shard in self.divided:
            parts += enumerate(tensors[place].split(shard.chunk_numel))
        found: dict[int, list[list[Tensor]]] = {}
        rooms: dict[int, int] = {}  # How much the last message of small parts still takes.
        for owner, part in sorted(parts, key=lambda each: each[1].numel() >= _LARGE_NUMEL):
            of_owner, room = found.setdefault(owner, []), rooms.get(owner, 0)
            if part.numel() <= room:
                of_owner[-1].append(part)
            else:
                of_owner.append([part])
                room = _LARGE_NUMEL
            rooms[owner] = room - part.numel()
        return found

    def rows(self) -> Rows:
        """The parameters' own memory as rows, made again where the loop has moved a parameter: :attr:`flats` follow
        their parameters, and views of them do not."""
        if self._rows is None or not self._rows.is_there():
            self._rows = Rows(self, self.flats)
        return self._rows

    @cached_property
    def parts(self) -> list[tuple[BucketShards, slice]]:
        """The bucket in parts with their places in a flat buffer, the last parameters first. See [Note: parts of a
        bucket]."""
        sizes_bytes = [0 if shard is None else shard.parameter.nbytes for shard in self._by_place]
        places = parts_by_need(sizes_bytes, _LEAST_BYTES_ON_STREAMS if self.on_streams else _LEAST_BYTES)
        if self.whole or len(places) == 1:
            return [(self, slice(None))]
        starts = [0, *itertools.accumulate(self._numels)]
        return [
            (BucketShards(self._by_place[some], self._numels[some]), slice(starts[some.start], starts[some.stop]))
            for some in places
        ]


class Rows:
    """The chunks of ``tensors`` as rows, on streams; see [Note: chunks]. Kept are views of the tensors alone.

    Args:
        shards: some of which are divided.
        tensors: the flat memory of the sharded parameters, or of their gradients.
    """

    def __init__(self, shards: BucketShards, tensors: Sequence[Tensor]) -> None:
        self._rank, self._ranks, self._shape = shards.rank, shards.ranks, (shards.ranks, shards.row_numel)
        self._sizes, self._padding_numel = shards.sizes, shards.ranks * shards.padding
        self._tensors = [tensors[place] for place, _ in shards.divided]
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        like = self._tensors[0]
        is_in_place = len(self._tensors) == 1 and like.numel() == math.prod(self._shape) and can_be_sent(like)
        self.in_place = like.view(self._shape) if is_in_place else None
        """The tensor itself, where it is such rows already."""
        # This rank's chunks, and the pieces of its row, some of which are padding; none is empty.
        self._own, self._own_places, self._row_sizes = list[Tensor](), list[int](), list[int]()
        for tensor, length, (_, shard) in zip(self._tensors, shards.sizes, shards.divided, strict=False):
            if (own := tensor[slice(*shard.range)]).numel():
                self._own.append(own)
                self._own_places.append(len(self._row_sizes))
            self._row_sizes += [numel for numel in (own.numel(), length - own.numel()) if numel]
        self._row_sizes += [shards.padding] if shards.padding else []
        # Where rows are unpacked to; tensors whose last chunks are short, and padding, by way of a room made each time.
        each = list(enumerate(zip(self._tensors, shards.sizes, strict=False)))
        self._short = [(place, one.numel()) for place, (one, length) in each if one.numel() != shards.ranks * length]
        self._filled = [self._tensors[place].view(-1) for place, _ in self._short]
        self._rooms = [*(place for place, _ in self._short), *range(len(each), len(shards.sizes))]
        views = [like if place in self._rooms else one.view(shards.ranks, length) for place, (one, length) in each]
        self._targets = [*views, *[like] * (len(shards.sizes) - len(each))]

    def is_there(self) -> bool:
        """Whether the tensors have the memory that they had."""
        return [tensor.data_ptr() for tensor in self._tensors] == self._addresses

    def new(self) -> Tensor:
        """Room for the rows of all ranks."""
        return self._tensors[0].new_empty(self._shape)

    def pack(self) -> Tensor:
        """The chunks of all ranks, as a copy."""
        rows, chunks = self.new(), self._tensors
        if self._padding_numel:
            chunks = [*chunks, rows.new_empty(self._padding_numel)]
        torch._chunk_cat(chunks, dim=0, num_chunks=self._ranks, out=rows)
        return rows

    def own_chunks(self, rows: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's chunks of the tensors, and their places in ``rows``."""
        pieces = rows[self._rank].split_with_sizes(self._row_sizes)
        return self._own, list(map(pieces.__getitem__, self._own_places))

    def unpack(self, rows: Tensor) -> None:
        """Copy the chunks of all ranks from ``rows``, of the tensors' dtype."""
        targets = list(self._targets)
        for place in self._rooms:
            targets[place] = rows.new_empty(self._ranks, self._sizes[place])
        torch.split_with_sizes_copy(rows, self._sizes, dim=1, out=targets)
        copy_all(self._filled, [targets[place].view(-1)[:numel] for place, numel in self._short])


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


def shards_of(parameters: Sequence[Tensor], *known: Mapping[int, Shard]) -> BucketShards | None:
    """The shards of a bucket of these parameters, by ``id`` in any of ``known``; ``None`` if none is sharded."""
    found = [next((each[id(p)] for each in known if id(p) in each), None) for p in parameters]
    if all(shard is None for shard in found):
        return None
    return BucketShards(found, [p.numel() for p in parameters])


def reduction(bucket: Bucket, shards: BucketShards | None) -> Plan:
    """Make the part of ``bucket.buffer`` that this rank owns the mean; the rest becomes this rank's own gradient,
    divided. Parameters that are not sharded are averaged on every rank: all, where ``shards`` is ``None``."""
    buffer, factor, group = bucket.buffer, 1 / bucket.divisor, bucket.group
    # As in DDP, each rank divides before the sum, which keeps half precision in range.

    def divide() -> None:
        buffer.mul_(factor)

    plan: list[Callable[[], Operation | None]] = [] if bucket.divisor == 1 else [divide]
    if shards is None:
        return *plan, lambda: all_reduce(buffer, group=group)
    is_alone = bucket.index == 0 and bucket.is_last and shards.on_streams
    for part, place in shards.parts if is_alone else [(shards, slice(None))]:
        tensors = part.gradients_of_all(buffer[place])
        if not shards.on_streams:
            plan += _reduce_by_messages(tensors, part, group)
            continue
        plan += [*_reduce_rows(tensors, part, group), *_each(reduce_each, tensors, part, group)]
    if not (rest := shards.rest(buffer)):
        return plan
    sent: list[Tensor] = []

    def send_rest() -> Operation:
        sent.append(torch.cat(rest))
        return all_reduce(sent[0], group=group)

    def copy_rest() -> None:
        copy_all(rest, sent.pop().split_with_sizes([part.numel() for part in rest]))

    return *plan, send_rest, copy_rest


def gathering(shards: BucketShards, group: dist.ProcessGroup) -> Plan:
    """Send the part of the parameters that each rank owns to all ranks, which changes the parameters."""
    if not shards.on_streams:
        return _gather_by_messages(shards, group)
    return *_gather_rows(shards, group), *_each(broadcast_each, shards.flats, shards, group)


def gathering_through(wire: Wire, shards: BucketShards, group: dist.ProcessGroup) -> Plan:
    """As :func:`gathering`, of masters of parameters that are divided, in one message a rank that ``wire`` encodes. The
    owner takes its own values as the others decode them, so all ranks have the same bits."""
    if not shards.divided:
        return ()
    codec = shards.codec = shards.codec or wire.codec(shards.row_numel)
    ranks, rank, device, encoded = shards.ranks, shards.rank, shards.flats[0].device, list[Tensor]()

    def encode() -> Operation:
        row = torch.zeros(1, shards.row_numel, dtype=torch.float32, device=device)
        shards.pack_masters(row[0])
        encoded.append(messages := torch.empty(ranks, codec.message_bytes, dtype=torch.uint8, device=device))
        codec.encode_rows(row, messages[rank : rank + 1])
        return all_gather(messages.view(-1), messages[rank], group=group)

    def decode() -> None:
        rows = torch.empty(ranks, shards.row_numel, dtype=torch.float32, device=device)
        codec.decode_rows(encoded.pop(), rows)
        shards.rows().unpack(rows.to(shards.flats[0].dtype))
        shards.note_published()

    return encode, decode


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


def _reduce_rows(tensors: Sequence[Tensor], shards: BucketShards, group: dist.ProcessGroup) -> Plan:
    """Add the other ranks' gradients to the parts of ``tensors`` that this rank owns."""
    if not shards.divided:
        return ()
    rows_of, packed = Rows(shards, tensors), list[Tensor]()

    def reduced(rows: Tensor) -> Operation:
        return reduce_scatter(rows[shards.rank], rows.view(-1), group=group)

    def pack() -> Operation:
        packed.append(rows := rows_of.pack())
        return reduced(rows)

    def unpack() -> None:
        copy_all(*rows_of.own_chunks(packed.pop()))

    return (pack, unpack) if rows_of.in_place is None else (partial(reduced, rows_of.in_place),)


def _gather_rows(shards: BucketShards, group: dist.ProcessGroup) -> Plan:
    """Fill the parts of the parameters that other ranks own."""
    if not shards.divided:
        return ()
    packed: list[tuple[Rows, Tensor]] = []

    def pack() -> Operation:
        rows_of = shards.rows()
        if (rows := rows_of.in_place) is None:
            rows = rows_of.new()
            chunks, places = rows_of.own_chunks(rows)
            copy_all(places, chunks)
            packed.append((rows_of, rows))
        return all_gather(rows.view(-1), rows[shards.rank], group=group)

    def unpack() -> None:
        for rows_of, rows in packed:
            rows_of.unpack(rows)
        packed.clear()

    return pack, unpack


def _reduce_by_messages(tensors: Sequence[Tensor], shards: BucketShards, group: dist.ProcessGroup) -> Plan:
    """As :func:`_reduce_rows`."""

    def send() -> Operation:
        row_numel = max(_LARGE_NUMEL, _ROW_BYTES // max(1, shards.ranks - 1) // tensors[0].element_size())
        messages = shards.messages(tensors)
        rows = [row for message in messages.pop(shards.rank, ()) for row in _in_rows(message, row_numel)]
        sends = [
            (row[0] if len(row) == 1 else torch.cat(row), owner)
            for owner, of_owner in messages.items()
            for message in of_owner
            for row in _in_rows(message, row_numel)
        ]
        return add_messages(sends, rows, group=group)

    return (send,) if shards.numel else ()


def _in_rows(message: list[Tensor], row_numel: int) -> list[list[Tensor]]:
    """A message as [Note: rows of a sum] has it: small parts are one row."""
    return [message] if len(message) > 1 else [[row] for row in message[0].split(row_numel)]


def _gather_by_messages(shards: BucketShards, group: dist.ProcessGroup) -> Plan:
    """As :func:`_gather_rows`."""
    # Of each message of small parts that is received: these, and the message.
    received: list[tuple[list[Tensor], Tensor]] = []

    def send() -> Operation:
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        peers = (*range(shards.rank), *range(shards.rank + 1, shards.ranks))
        for owner, messages in shards.messages(shards.flats).items():
            for parts in messages:
                message = parts[0] if len(parts) == 1 else torch.cat(parts)
                if owner == shards.rank:
                    sends += [(message, peer) for peer in peers]
                    continue
                receives.append((message, owner))
                if len(parts) > 1:
                    received.append((parts, message))
        return send_recv(sends, receives, group=group, label="all_gather")

    def unpack() -> None:
        for parts, message in received:
            copy_all(parts, message.split_with_sizes([part.numel() for part in parts]))
        received.clear()

    return (send, unpack) if shards.numel else ()
