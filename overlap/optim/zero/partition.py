"""Which rank owns which elements: arithmetic on sizes, without tensors.

[Note: ownership]

A parameter is cut into one range of elements per rank, in the order of its memory. Ranges depend only on the sizes of
the parameters and on the number of ranks, never on DDP's buckets. So buckets can be rebuilt, and a state that was saved
at one number of ranks can be loaded at another.

By *element*, every rank owns an equal part of every parameter. Ranges start at multiples of 128 bytes: CPU kernels take
two vectors of at most 64 bytes at a time, and what is left at the end of a tensor one element at a time, which rounds
differently in 16-bit types. So each element is treated as it would be in the whole tensor, and results equal those of
the plain optimizer bit for bit. Where a tensor's memory begins makes no difference, since kernels load unaligned
vectors; but threads do, which cut a long tensor anywhere. What does not divide evenly goes to the ranks that own least
so far: over a whole model the totals of the ranks differ by some hundreds of bytes. By *parameter*, one rank owns all
of a parameter; those that cost most to update are given first, each to the rank with the least work so far. An update
costs what it reads and writes, and of matrices that are orthogonalized (see :mod:`overlap.optim.zero.update_cost`) the
arithmetic, which grows faster than the matrix. Parameters that are frozen have no state, so they are balanced by
themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from overlap.hooks.segments import round_up

__all__ = ["ByElement", "ByParameter", "Extent", "Layout", "Partition", "Piece", "Range"]

_BLOCK_BYTES = 128
# What a matrix product computes, about, while memory moves a byte of a parameter, its gradient and its state.
_FLOPS_PER_BYTE = 32

Range = tuple[int, int]


@dataclass(frozen=True)
class Extent:
    """What the division needs to know of a parameter."""

    numel: int
    itemsize: int
    """Bytes per element."""
    is_trained: bool = True
    pool: Hashable = None
    """Parameters of one pool have state of the same size per element, so equal numbers are equal sizes."""
    flops: int = 0
    """Arithmetic of one update beyond reading and writing each element a few times."""

    @property
    def size_bytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def cost(self) -> int:
        """Of one update, in floating-point operations."""
        return self.size_bytes * _FLOPS_PER_BYTE + self.flops

    @property
    def block_numel(self) -> int:
        """Where ranges begin, in elements."""
        return max(1, _BLOCK_BYTES // self.itemsize)

    @property
    def blocks(self) -> int:
        """How many may be given to ranks."""
        return -(-self.numel // self.block_numel)


class Partition(Protocol):
    """Gives ranges to ranks, and remembers what it gave, to keep the ranks even."""

    is_whole: bool
    """Whether a parameter is never cut."""

    def assign(self, extents: Sequence[Extent]) -> list[tuple[Range, ...]]:
        """One range per rank for each parameter."""
        ...


class ByElement:
    """Equal ranges of every parameter."""

    is_whole = False

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._owned: dict[Hashable, list[int]] = {}

    def assign(self, extents: Sequence[Extent]) -> list[tuple[Range, ...]]:
        return [self._cut(extent) for extent in extents]

    def _cut(self, extent: Extent) -> tuple[Range, ...]:
        numel, block_numel = extent.numel, extent.block_numel
        pool = (extent.pool, extent.itemsize, extent.is_trained)
        owned = self._owned.setdefault(pool, [0] * self._ranks)
        each, extra = divmod(extent.blocks, self._ranks)
        ranges: list[Range] = [(numel, numel)] * self._ranks
        start, given = 0, 0
        # The ranks that own least come first, where the larger ranges are.
        for place, rank in enumerate(sorted(range(self._ranks), key=lambda rank: (owned[rank], rank))):
            given += each + (place < extra)
            end = numel if given == extent.blocks else given * block_numel
            ranges[rank] = (start, end)
            owned[rank] += end - start
            start = end
        return tuple(ranges)


class ByParameter:
    """Whole parameters, balanced by what their updates cost and, where that is equal, by size."""

    is_whole = True

    def __init__(self, ranks: int) -> None:
        self._ranks = range(ranks)
        self._owned = {True: [(0, 0)] * ranks, False: [(0, 0)] * ranks}
        """Cost and bytes, of trained parameters and of frozen ones."""

    def assign(self, extents: Sequence[Extent]) -> list[tuple[Range, ...]]:
        ranges: dict[int, tuple[Range, ...]] = {}
        for place in sorted(range(len(extents)), key=lambda place: (-extents[place].cost, place)):
            extent = extents[place]
            owned = self._owned[extent.is_trained]
            owner = min(self._ranks, key=lambda rank: (owned[rank], rank))
            owned[owner] = owned[owner][0] + extent.cost, owned[owner][1] + extent.size_bytes
            ranges[place] = tuple((0, extent.numel) if rank == owner else (0, 0) for rank in self._ranks)
        return [ranges[place] for place in range(len(extents))]


@dataclass(frozen=True)
class Piece:
    """The range of one parameter that one rank owns, never empty."""

    place: int
    """Which parameter, in the layout's order."""
    rank: int
    start: int
    end: int

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Layout:
    """The parameters of a bucket in the two orders that a sharded update needs.

    *Flat*: parameter after parameter, as in DDP's bucket. *Packed*: rank after rank, so that what a rank owns is one
    segment that a collective can send; segments are padded to one length if ``is_even``, a multiple of
    ``segment_multiple`` elements.
    """

    ranges: tuple[tuple[Range, ...] | None, ...]
    """The ranges of each parameter; ``None`` for one that is not sharded, which the packed order leaves out."""
    numels: tuple[int, ...]
    is_even: bool
    segment_multiple: int = 1

    @cached_property
    def ranks(self) -> int:
        return next(len(ranges) for ranges in self.ranges if ranges is not None)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces in packed order."""
        return tuple(
            Piece(place, rank, *ranges[rank])
            for rank in range(self.ranks)
            for place, ranges in enumerate(self.ranges)
            if ranges is not None and ranges[rank][0] < ranges[rank][1]
        )

    def part(self, places: slice) -> Layout:
        """The layout of some of the parameters by themselves."""
        return replace(self, ranges=self.ranges[places], numels=self.numels[places])

    def of_rank(self, rank: int) -> slice:
        """Where the pieces of ``rank`` are among :attr:`pieces`."""
        return self._by_rank[rank]

    @cached_property
    def _by_rank(self) -> tuple[slice, ...]:
        counts = [sum(piece.rank == rank for piece in self.pieces) for rank in range(self.ranks)]
        ends = list(itertools.accumulate(counts))
        return tuple(slice(end - count, end) for end, count in zip(ends, counts, strict=True))

    @cached_property
    def owned_numels(self) -> tuple[int, ...]:
        """How many elements each rank owns."""
        return tuple(sum(piece.numel for piece in self.pieces if piece.rank == rank) for rank in range(self.ranks))

    @cached_property
    def gathered_numels(self) -> tuple[int, ...]:
        """How many elements each rank sends in a gather: as many as the others if ``is_even``."""
        return (max(self.owned_numels),) * self.ranks if self.is_even else self.owned_numels

    @cached_property
    def segment_numels(self) -> tuple[int, ...]:
        """The length of each rank's segment, padding included."""
        multiple = self.segment_multiple if self.is_even else 1
        return tuple(round_up(numel, multiple) for numel in self.gathered_numels)

    def segment(self, rank: int) -> slice:
        """Where the segment of ``rank`` is in a packed buffer."""
        start = sum(self.segment_numels[:rank])
        return slice(start, start + self.segment_numels[rank])

    @cached_property
    def packed_numel(self) -> int:
        return sum(self.segment_numels)

    @cached_property
    def packed_cuts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The lengths that cut a packed buffer, and the places of the pieces among the cuts, in the pieces' order."""
        lengths: list[int] = []
        chosen: list[int] = []
        for rank in range(self.ranks):
            for piece in self.pieces[self.of_rank(rank)]:
                chosen.append(len(lengths))
                lengths.append(piece.numel)
            lengths.append(self.segment_numels[rank] - sum(p.numel for p in self.pieces[self.of_rank(rank)]))
        return tuple(lengths), tuple(chosen)

    @cached_property
    def flat_cuts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """As :attr:`packed_cuts`, of a flat buffer."""
        lengths: list[int] = []
        found: dict[tuple[int, int], int] = {}
        for place, (ranges, numel) in enumerate(zip(self.ranges, self.numels, strict=True)):
            if ranges is None:
                lengths.append(numel)
                continue
            for start, end, rank in sorted((start, end, rank) for rank, (start, end) in enumerate(ranges)):
                if start < end:
                    found[place, rank] = len(lengths)
                    lengths.append(end - start)
        return tuple(lengths), tuple(found[piece.place, piece.rank] for piece in self.pieces)
