"""Which rank owns which elements: arithmetic on sizes, without tensors.

[Note: ownership]

A parameter is cut into one range of elements per rank, in the order of its memory. Ranges depend only on the sizes of
the parameters and on the number of ranks, never on DDP's buckets. So buckets can be rebuilt, and a state that was saved
at one number of ranks can be loaded at another.

By *element*, every rank owns an equal part of every parameter. Ranges start at multiples of 16 elements, so that a
vectorized kernel treats each element as it would in the whole tensor, and results equal those of the plain optimizer
bit for bit. What does not divide evenly goes to the ranks that own least so far: over a whole model the totals of the
ranks differ by some dozens of elements. By *parameter*, one rank owns all of a parameter; the largest are given first.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

__all__ = ["ByElement", "ByParameter", "Layout", "Partition", "Piece", "Range"]

# A vector register of AVX-512 holds 16 floats.
_BLOCK_NUMEL = 16

Range = tuple[int, int]


class Partition(Protocol):
    """Gives ranges to ranks, and remembers what it gave, to keep the ranks even."""

    is_whole: bool
    """Whether a parameter is never cut."""

    def assign(self, numels: Sequence[int], pools: Sequence[Hashable]) -> list[tuple[Range, ...]]:
        """One range per rank for each parameter; ranks are kept even within each pool (state of the same size)."""
        ...


class ByElement:
    """Equal ranges of every parameter."""

    is_whole = False

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._owned: dict[Hashable, list[int]] = {}

    def assign(self, numels: Sequence[int], pools: Sequence[Hashable]) -> list[tuple[Range, ...]]:
        return [self._cut(numel, pool) for numel, pool in zip(numels, pools, strict=True)]

    def _cut(self, numel: int, pool: Hashable) -> tuple[Range, ...]:
        owned = self._owned.setdefault(pool, [0] * self._ranks)
        each, extra = divmod(-(-numel // _BLOCK_NUMEL), self._ranks)
        ranges: list[Range] = [(numel, numel)] * self._ranks
        start = 0
        # The ranks that own least come first, where the larger ranges are.
        for place, rank in enumerate(sorted(range(self._ranks), key=lambda rank: (owned[rank], rank))):
            end = min(start + (each + (place < extra)) * _BLOCK_NUMEL, numel)
            ranges[rank] = (start, end)
            owned[rank] += end - start
            start = end
        return tuple(ranges)


class ByParameter:
    """Whole parameters, balanced by size."""

    is_whole = True

    def __init__(self, ranks: int) -> None:
        self._owned = [0] * ranks

    def assign(self, numels: Sequence[int], pools: Sequence[Hashable]) -> list[tuple[Range, ...]]:
        ranges: dict[int, tuple[Range, ...]] = {}
        for place in sorted(range(len(numels)), key=lambda place: (-numels[place], place)):
            owner = min(range(len(self._owned)), key=lambda rank: (self._owned[rank], rank))
            self._owned[owner] += numels[place]
            ranges[place] = tuple((0, numels[place]) if rank == owner else (0, 0) for rank in range(len(self._owned)))
        return [ranges[place] for place in range(len(numels))]


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
    segment that a collective can send; segments are padded to one length if ``is_even``.
    """

    ranges: tuple[tuple[Range, ...] | None, ...]
    """The ranges of each parameter; ``None`` for one that is not sharded, which the packed order leaves out."""
    numels: tuple[int, ...]
    is_even: bool

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

    def of_rank(self, rank: int) -> slice:
        """Where the pieces of ``rank`` are among :attr:`pieces`."""
        before = sum(piece.rank < rank for piece in self.pieces)
        return slice(before, before + sum(piece.rank == rank for piece in self.pieces))

    @cached_property
    def owned_numels(self) -> tuple[int, ...]:
        """How many elements each rank owns."""
        return tuple(sum(piece.numel for piece in self.pieces if piece.rank == rank) for rank in range(self.ranks))

    @cached_property
    def segment_numels(self) -> tuple[int, ...]:
        """The length of each rank's segment, padding included."""
        return tuple([max(self.owned_numels)] * self.ranks if self.is_even else self.owned_numels)

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
