"""The shards of the parameters in one bucket."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from overlap.hooks import Bucket
from overlap.hooks.segments import segment_multiple
from overlap.optim.zero.gather_parts import bytes_at_once, least_part_bytes, parts_by_need
from overlap.optim.zero.partition import Layout
from overlap.optim.zero.sharding import Ownership, Shard

__all__ = ["BucketShards", "ShardsByBucket", "beginning", "beginnings", "in_elements", "reduced", "shards_of_bucket"]


class BucketShards:
    """Cuts the buffers of a bucket into the pieces that each rank owns."""

    def __init__(self, layout: Layout, shards: tuple[Shard | None, ...], rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self._shards = tuple(shard for shard in shards if shard is not None)
        self.segment = layout.segment(rank)
        self._slice = layout.of_rank(rank)
        self._by_place = shards

    def __iter__(self) -> Iterator[Shard]:
        """The shards in the bucket's order, without the parameters that are not sharded."""
        return iter(self._shards)

    @cached_property
    def owned(self) -> tuple[Shard, ...]:
        """The shards that this rank's optimizer has a part of, which may be empty."""
        return tuple(shard for shard in self._shards if shard.own is not None)

    @cached_property
    def parameter_pieces(self) -> list[Tensor]:
        """The parameters' own memory, in packed order."""
        return [
            shard.views[piece.rank]
            for piece in self.layout.pieces
            if (shard := self._by_place[piece.place]) is not None
        ]

    @cached_property
    def owning(self) -> tuple[Shard, ...]:
        """The shards of the pieces that this rank owns, in packed order."""
        found = (self._by_place[piece.place] for piece in self.layout.pieces[self._slice])
        return tuple(shard for shard in found if shard is not None)

    @property
    def are_sharded(self) -> list[bool]:
        """For each parameter of the bucket, whether it is sharded."""
        return [shard is not None for shard in self._by_place]

    def own_of(self, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
        """Those of ``pieces``, in packed order, that this rank owns."""
        return pieces[self._slice]

    def others_of(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Those of ``pieces`` that other ranks own."""
        return [*pieces[: self._slice.start], *pieces[self._slice.stop :]]

    def by_rank(self, pieces: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """``pieces``, in packed order, of each rank."""
        return [pieces[self.layout.of_rank(rank)] for rank in range(self.layout.ranks)]

    def cut_packed(self, packed: Tensor) -> list[Tensor]:
        """The pieces of a packed buffer."""
        return _cut(packed, self.layout.packed_cuts)

    def cut_flat(self, flat: Tensor) -> list[Tensor]:
        """The pieces of a flat buffer, in packed order."""
        return _cut(flat, self.layout.flat_cuts)

    def gradients(self, flat: Tensor) -> list[Tensor]:
        """This rank's part of each of :attr:`owned` in a flat buffer of gradients, empty parts included."""
        parts: list[Tensor] = []
        offset = 0
        for shard, numel in zip(self._by_place, self.layout.numels, strict=True):
            if shard is not None and shard.own is not None:
                start, end = shard.range
                parts.append(flat[offset + start : offset + end])
            offset += numel
        return parts

    def means(self, flat: Tensor) -> tuple[Tensor | None, ...]:
        """Where this rank has the mean after a reduction of ``flat``, for each parameter of the bucket: its own part of
        a sharded one; ``None`` for one that is not sharded."""
        parts: list[Tensor | None] = []
        offset = 0
        for shard, numel in zip(self._by_place, self.layout.numels, strict=True):
            # DDP's buffer holds a complex gradient as pairs of real numbers.
            width = 2 if shard is not None and shard.parameter.is_complex() and not flat.is_complex() else 1
            start, end = (0, 0) if shard is None else shard.range
            parts.append(None if shard is None else flat[(offset + start) * width : (offset + end) * width])
            offset += numel
        return tuple(parts)

    def rest(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat buffer that belong to parameters which are not sharded."""
        lengths, chosen = self.layout.flat_cuts
        taken = set(chosen)
        return [part for place, part in enumerate(flat.split_with_sizes(lengths)) if place not in taken]

    @cached_property
    def parts(self) -> tuple[BucketShards, ...]:
        """The bucket in parts that are gathered one by one, the last parameters first. See [Note: parts of a gather]
        in :mod:`overlap.optim.zero.gather_parts`."""
        sizes_bytes = [0 if shard is None else shard.parameter.nbytes for shard in self._by_place]
        least_bytes = least_part_bytes(self._shards[0].parameter.device)
        if not self.layout.is_even or sum(sizes_bytes) < 2 * least_bytes:
            return (self,)
        return tuple(self._part(places) for places in parts_by_need(sizes_bytes, least_bytes))

    @property
    def whole(self) -> tuple[tuple[BucketShards, slice], ...]:
        """The bucket as one part, as :attr:`in_turn`."""
        return ((self, slice(0, sum(self.layout.numels))),)

    @cached_property
    def in_turn(self) -> tuple[tuple[BucketShards, slice], ...]:
        """The bucket in parts that are reduced in turn, each with its place in a flat buffer; those of which nothing is
        sharded are left out. See [Note: what is reduced at once] in :mod:`overlap.optim.zero.gather_parts`."""
        sizes_bytes = [0 if shard is None else shard.parameter.nbytes for shard in self._by_place]
        parts = parts_by_need(sizes_bytes, bytes_at_once(self._shards[0].parameter.device))
        if len(parts) == 1:
            return self.whole
        starts = [0, *itertools.accumulate(self.layout.numels)]
        return tuple(
            (self._part(places), slice(starts[places.start], starts[places.stop]))
            for places in reversed(parts)
            if any(shard is not None for shard in self._by_place[places])
        )

    def _part(self, places: slice) -> BucketShards:
        return BucketShards(self.layout.part(places), self._by_place[places], self.rank)

    def note_written(self) -> None:
        """The gather has written the other ranks' parts."""
        for shard in self._shards:
            shard.note_written()


def shards_of_bucket(parameters: Sequence[Tensor], ownerships: Sequence[Ownership]) -> BucketShards | None:
    """The shards of a bucket of these parameters, in any of ``ownerships``; ``None`` if none is sharded."""
    found = tuple(_first(ownership.shards.get(id(parameter)) for ownership in ownerships) for parameter in parameters)
    if all(shard is None for shard in found):
        return None
    layout = Layout(
        ranges=tuple(None if shard is None else shard.ranges for shard in found),
        numels=tuple(parameter.numel() for parameter in parameters),
        is_even=not any(shard is not None and shard.is_whole and shard.parameter.dim() for shard in found),
        segment_multiple=segment_multiple(parameters[0].device),
    )
    return BucketShards(layout, found, ownerships[0].group.rank())


class ShardsByBucket:
    """The shards of each bucket that comes, found once.

    Args:
        ownerships: what the parameters may be sharded by.
        before_new: called before the shards of a new bucket are made.
    """

    def __init__(self, ownerships: Sequence[Ownership], before_new: Callable[[], None]) -> None:
        self._ownerships = ownerships
        self._before_new = before_new
        self._found: dict[tuple[int, ...], BucketShards | None] = {}

    def of(self, bucket: Bucket) -> BucketShards | None:
        """The shards of ``bucket``; ``None`` if none of its parameters is sharded."""
        # Parameters may be added to an optimizer, but never leave it.
        numbers = (len(ownership.shards) for ownership in self._ownerships)
        key = (*numbers, *map(id, bucket.parameters))
        if key not in self._found:
            self._before_new()
            self._found[key] = shards_of_bucket(bucket.parameters, self._ownerships)
        return self._found[key]


def in_elements(bucket: Bucket) -> Bucket:
    """``bucket`` with a complex buffer if its gradients are complex; DDP's holds pairs of real numbers.

    A shard's elements are those of its parameter.
    """
    if bucket.parameters[0].is_complex() and not bucket.buffer.is_complex():
        return replace(bucket, buffer=torch.view_as_complex(bucket.buffer.view(-1, 2)))
    return bucket


def reduced(bucket: Bucket, shards: BucketShards | None) -> Bucket:
    """``bucket`` after the reduction of ``shards``, as the next stage sees it."""
    return replace(bucket, is_mean=True, owned=None if shards is None else shards.means(bucket.buffer))


def _first(shards: Iterable[Shard | None]) -> Shard | None:
    return next((shard for shard in shards if shard is not None), None)


def _cut(buffer: Tensor, cuts: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Tensor]:
    lengths, chosen = cuts
    parts = buffer.split_with_sizes(lengths)
    return [parts[place] for place in chosen]


def beginning(flat: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """The beginning of ``flat``, which may be longer, in parts of the lengths of ``pieces``."""
    return beginnings(flat[None], [pieces])


def beginnings(rows: Tensor, pieces: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """The :func:`beginning` of each of ``rows``, which are contiguous, one after another."""
    lengths: list[int] = []
    for own in pieces:
        numels = [piece.numel() for piece in own]
        lengths += [*numels, rows.size(1) - sum(numels)]
    ends = set(itertools.accumulate(len(own) + 1 for own in pieces))
    parts = rows.view(-1).split_with_sizes(lengths)
    return [part for place, part in enumerate(parts, start=1) if place not in ends]
