"""The shards of the parameters in one bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from torch import Tensor

from overlap.optim.zero.partition import Layout
from overlap.optim.zero.sharding import Ownership, Shard

__all__ = ["BucketShards", "beginning", "shards_of_bucket"]


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

    def rest(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat buffer that belong to parameters which are not sharded."""
        lengths, chosen = self.layout.flat_cuts
        taken = set(chosen)
        return [part for place, part in enumerate(flat.split_with_sizes(lengths)) if place not in taken]

    def note_written(self) -> None:
        """The gather has written the other ranks' parts."""
        for shard in self._shards:
            shard.note_written()


def shards_of_bucket(parameters: Sequence[Tensor], ownership: Ownership) -> BucketShards | None:
    """The shards of a bucket of these parameters; ``None`` if none is sharded."""
    found = tuple(ownership.shards.get(id(parameter)) for parameter in parameters)
    if all(shard is None for shard in found):
        return None
    layout = Layout(
        ranges=tuple(None if shard is None else shard.ranges for shard in found),
        numels=tuple(parameter.numel() for parameter in parameters),
        is_even=ownership.is_even,
    )
    return BucketShards(layout, found, ownership.group.rank())


def _cut(buffer: Tensor, cuts: tuple[tuple[int, ...], tuple[int, ...]]) -> list[Tensor]:
    lengths, chosen = cuts
    parts = buffer.split_with_sizes(lengths)
    return [parts[place] for place in chosen]


def beginning(flat: Tensor, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """The beginning of ``flat``, which may be longer, in parts of the lengths of ``pieces``."""
    numels = [piece.numel() for piece in pieces]
    return flat.split_with_sizes([*numels, flat.numel() - sum(numels)])[:-1]
