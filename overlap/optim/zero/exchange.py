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

[Note: parts of a gather]

A bucket of 25 MB takes a fifth of a second on a link of 1 Gbit/s, for which a forward would wait for its first layer.
So a gather during the next forward is cut between parameters, the bucket's last ones first, which the forward needs
first, into parts that are large next to the cost of a message. Whole parameters are not parted, since one rank would
send each part and the links of the others rest. Parts depend on the sizes of the parameters alone, so they are the same
on every rank.

[Note: reduced in turn]

A collective needs a packed copy of the bucket. DDP's first pass has one bucket of the whole model, and that copy would
be the largest of the run. So a single large bucket is reduced in parts, one after another; where other buckets follow,
the link would rest between parts. On Gloo see [Note: rows of a sum] in :mod:`overlap._torch.c10d`. Gathers without a
stage, which know no buckets, have the same parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.device import has_streams
from overlap._torch.foreach import copy_all
from overlap.hooks import Bucket, all_gather, all_reduce, reduce_scatter, send_recv
from overlap.hooks.collectives import add_messages
from overlap.hooks.engine.wavefront import BackgroundTask
from overlap.hooks.segments import round_up, segment_multiple
from overlap.optim.zero.shards import Shard

__all__ = ["BucketShards", "Exchange", "Gather", "in_elements", "parts_by_need", "reduced"]

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
    """Cuts the buffers of a bucket into the pieces that each rank owns.

    *Flat* is a buffer of parameter after parameter, as DDP's bucket. *Packed* is one of rank after rank, of sharded
    parameters alone: a rank's pieces are one segment, of one length if a collective can send it.

    Args:
        shards: of each parameter of the bucket; ``None`` of one that is not sharded.
        numels: of each parameter.
        rank: this one.
        packs_all: whether all pieces are in the packed buffer; if not, large ones travel by themselves.
    """

    def __init__(
        self, shards: Sequence[Shard | None], numels: Sequence[int], rank: int, *, packs_all: bool = True
    ) -> None:
        self._by_place, self._numels, self._packs_all, self.rank = shards, numels, packs_all, rank
        self._shards = [shard for shard in shards if shard is not None]
        self.like = self._shards[0].parameter
        """One of the parameters."""
        self.numel = sum(shard.parameter.numel() for shard in self._shards)
        """How many elements the sharded parameters have."""
        self.own_parameters = [shard.parameter for shard in self._shards if shard.own is not None]
        """Those of which this rank's optimizer has a part, which may be empty."""
        self._has_whole = any(shard.is_whole and shard.parameter.dim() for shard in self._shards)
        self.is_even = packs_all and not self._has_whole
        """Whether the segments are of one length, so that a collective can send them."""
        ranks = range(len(self._shards[0].ranges))
        self.peers = [other for other in ranks if other != rank]
        # Where this rank's part of each parameter is in a flat buffer, and parameters that are not sharded.
        self._own_slices: list[slice | None] = []
        self._rest_slices: list[slice] = []
        # The pieces of a flat buffer in its order; those of each rank that are packed, by their place among these and
        # in the parameters' own memory; and those that are not packed.
        self._piece_numels: list[int] = []
        small: list[list[tuple[int, Tensor]]] = [[] for _ in ranks]
        large: list[list[slice]] = [[] for _ in ranks]
        self._large_parameters: list[list[Tensor]] = [[] for _ in ranks]
        for shard, start, numel in zip(shards, itertools.accumulate(numels, initial=0), numels, strict=False):
            if shard is None:
                self._own_slices.append(None)
                self._rest_slices.append(slice(start, start + numel))
                self._piece_numels.append(numel)
                continue
            self._own_slices.append(slice(start + shard.range[0], start + shard.range[1]))
            for owner in sorted(ranks, key=shard.ranges.__getitem__):
                first, last = shard.ranges[owner]
                if first == last:
                    continue
                if last - first >= _LARGE_NUMEL and not packs_all:
                    large[owner].append(slice(start + first, start + last))
                    self._large_parameters[owner].append(shard.views[owner])
                else:
                    small[owner].append((len(self._piece_numels), shard.views[owner]))
                self._piece_numels.append(last - first)
        pairs = zip(self._own_slices, shards, strict=True)
        self._owned_slices = [own for own, shard in pairs if own and shard and shard.own is not None]
        self._packed = [place for pieces in small for place, _ in pieces]
        self.parameter_pieces = [view for pieces in small for _, view in pieces]
        """The parameters' own memory, in packed order."""
        firsts = [0, *itertools.accumulate(map(len, small))]
        self.own_packed = slice(firsts[rank], firsts[rank + 1])
        """Where this rank's pieces are among those that are packed."""
        self.segments: list[slice] = []
        """Where each rank's segment is in a packed buffer."""
        # The segments without their padding; the sizes of the pieces and paddings of a packed buffer, and the places of
        # the pieces among these.
        self._filled: list[slice] = []
        self._part_numels: list[int] = []
        self._parts: list[int] = []
        self.packed_numel = 0
        multiple = segment_multiple(self.like.device)  # See [Note: segments] in :mod:`overlap.hooks.segments`.
        filled_numels = [sum(view.numel() for _, view in pieces) for pieces in small]
        for pieces, filled_numel in zip(small, filled_numels, strict=True):
            start, numel = self.packed_numel, round_up(max(filled_numels) if self.is_even else filled_numel, multiple)
            self.packed_numel += numel
            self.segments.append(slice(start, self.packed_numel))
            self._filled.append(slice(start, start + filled_numel))
            self._parts += range(len(self._part_numels), len(self._part_numels) + len(pieces))
            self._part_numels += [*(view.numel() for _, view in pieces), numel - filled_numel]
        row_numel = max(1, self.packed_numel)
        if not has_streams(self.like.device):
            row_numel = max(_LARGE_NUMEL, _ROW_BYTES // max(1, len(self.peers)) // self.like.element_size())
        self._large_rows = [[row for one in own for row in _rows(one, row_numel)] for own in large]
        self._packed_rows = [_rows(filled, row_numel) for filled in self._filled]

    def __iter__(self) -> Iterator[Shard]:
        """The shards in the bucket's order, without the parameters that are not sharded."""
        return iter(self._shards)

    def packed_of(self, flat: Tensor) -> list[Tensor]:
        """The pieces of a flat buffer that are packed, in packed order."""
        return list(map(flat.split_with_sizes(self._piece_numels).__getitem__, self._packed))

    def cut_packed(self, packed: Tensor) -> list[Tensor]:
        """The pieces of a packed buffer."""
        return list(map(packed.split_with_sizes(self._part_numels).__getitem__, self._parts))

    def new_parameters(self, owner: int, packed: Tensor) -> list[Tensor]:
        """What ``owner`` sends in a gather, from and to the parameters' own memory where it is not packed."""
        small = packed[self._filled[owner]]
        return [*self._large_parameters[owner], *([small] if small.numel() else [])]

    def messages(self, owner: int, flat: Tensor, packed: Tensor) -> list[Tensor]:
        """What is sent to ``owner`` in a sum. See [Note: rows of a sum] in :mod:`overlap._torch.c10d`."""
        large = map(flat.__getitem__, self._large_rows[owner])
        return [*large, *map(packed.__getitem__, self._packed_rows[owner])]

    def others_of(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Those of ``pieces``, in packed order, that other ranks own."""
        return [*pieces[: self.own_packed.start], *pieces[self.own_packed.stop :]]

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

    @cached_property
    def parts(self) -> list[BucketShards]:
        """The bucket in parts, the last parameters first. See [Note: parts of a gather]."""
        if self._has_whole:
            return [self]
        on_streams = has_streams(self.like.device)
        return [part for part, _ in self._cut(_LEAST_BYTES_ON_STREAMS if on_streams else _LEAST_BYTES)]

    @cached_property
    def in_turn(self) -> list[tuple[BucketShards, slice]]:
        """The bucket in parts with their places in a flat buffer. See [Note: reduced in turn]."""
        on_streams = has_streams(self.like.device)
        return self._cut(_AT_ONCE_BYTES_ON_STREAMS if on_streams else _AT_ONCE_BYTES)

    def _cut(self, least_bytes: int) -> list[tuple[BucketShards, slice]]:
        sizes_bytes = [0 if shard is None else shard.parameter.nbytes for shard in self._by_place]
        places = parts_by_need(sizes_bytes, least_bytes)
        if len(places) == 1:
            return [(self, slice(None))]
        starts = [0, *itertools.accumulate(self._numels)]
        return [
            (
                BucketShards(self._by_place[some], self._numels[some], self.rank, packs_all=self._packs_all),
                slice(starts[some.start], starts[some.stop]),
            )
            for some in places
        ]


def _rows(of: slice, row_numel: int) -> list[slice]:
    """``of`` in rows of at most so many elements."""
    return [slice(start, min(of.stop, start + row_numel)) for start in range(of.start, of.stop, row_numel)]


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


class Exchange:
    """How the ranks of a group exchange gradients and parameters.

    Args:
        sends_directly: whether to send messages instead of collectives: on Gloo, whose reduce-scatter sends as much as
            an all-reduce, and whose all-gather copies its result. Segments of unequal lengths always are messages.
    """

    def __init__(self, *, sends_directly: bool) -> None:
        self.sends_directly = sends_directly
        # Flat buffers, kept from bucket to bucket and step to step: on a CPU the first use of fresh memory takes longer
        # than the copy into it. Accelerators have a caching allocator, which also knows about streams.
        self._free: list[Tensor] = []

    def shards_of(self, parameters: Sequence[Tensor], *known: Mapping[int, Shard]) -> BucketShards | None:
        """The shards of a bucket of these parameters, by ``id`` in any of ``known``; ``None`` if none is sharded."""
        # DDP's first backward has one bucket of all parameters; its large buffers are not kept for smaller ones.
        self.trim()
        found = [next((each[id(p)] for each in known if id(p) in each), None) for p in parameters]
        rank = next((shard.rank for shard in found if shard is not None), None)
        if rank is None:
            return None
        return BucketShards(found, [p.numel() for p in parameters], rank, packs_all=not self.sends_directly)

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
        room = self._take(shards.packed_numel, flat)
        packed, own = room[: shards.packed_numel], shards.own_packed
        pieces, packed_pieces = shards.packed_of(flat), shards.cut_packed(packed)
        copy_all(packed_pieces, pieces)
        if shards.is_even:
            await reduce_scatter(packed[shards.segments[shards.rank]], packed, group=group)
        else:
            sends: list[tuple[Tensor, int]] = []
            for peer in shards.peers:
                sends += zip(shards.messages(peer, flat, packed), repeat(peer))
            await add_messages(sends, list(zip(shards.messages(shards.rank, flat, packed))), group=group)
        copy_all(pieces[own], packed_pieces[own])
        self._give(room)

    async def gather(self, shards: BucketShards, group: dist.ProcessGroup) -> None:
        """Send the part of the parameters that each rank owns to all ranks, which changes the parameters."""
        if shards.numel == 0:
            return
        room = self._take(shards.packed_numel, shards.like)
        packed, own = room[: shards.packed_numel], shards.own_packed
        pieces = shards.cut_packed(packed)
        copy_all(pieces[own], shards.parameter_pieces[own])
        if shards.is_even:
            await all_gather(packed, packed[shards.segments[shards.rank]], group=group)
        else:
            sends: list[tuple[Tensor, int]] = []
            receives: list[tuple[Tensor, int]] = []
            for peer in shards.peers:
                sends += zip(shards.new_parameters(shards.rank, packed), repeat(peer))
                receives += zip(shards.new_parameters(peer, packed), repeat(peer))
            await send_recv(sends, receives, group=group, label="all_gather")
        copy_all(shards.others_of(shards.parameter_pieces), shards.others_of(pieces))
        self._give(room)

    def _take(self, numel: int, like: Tensor) -> Tensor:
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

    def _give(self, buffer: Tensor) -> None:
        """Take back a buffer."""
        if not has_streams(buffer.device):
            self._free.append(buffer)

    def trim(self) -> None:
        """Free the buffers that are not in use, before buckets of other sizes."""
        self._free.clear()
