"""Which gradients of a bucket are compressed, and where their factors lie in what is sent.

[Note: layout of factors]

A matrix M of n x m is approximated by ``left.T @ right`` with left ``(rank, n)`` and right ``(rank, m)``:
directions are rows, because products with a matrix are then several times faster on a CPU than with
directions as columns. Matrices of one shape form a *batch*, and are multiplied by one kernel. Factors of one
length and rank, of whatever batches, form a *family*, and are orthonormalized by one kernel. All left factors
of a bucket lie in one flat tensor and all right ones in another, sorted such that the factors of a batch are
one view ``(count, rank, length)`` of it and those of a family, too. So what is sent is never put together
from parts.

Everything here follows from shapes and options alone, hence is the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

__all__ = ["Batch", "Family", "Plan", "make_plan", "matrix_shape", "pays", "square_plan"]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int] | None:
    """Rows and columns of a gradient as a matrix: the first dimension and all others; ``None`` for a vector.

    >>> matrix_shape((64, 3, 7, 7))
    (64, 147)
    """
    numel = math.prod(shape)
    if len(shape) < 2 or numel == 0:
        return None
    return shape[0], numel // shape[0]


def pays(rows: int, cols: int, rank: int, min_compression_rate: float) -> bool:
    """Whether the factors of a matrix have fewer than ``1 / min_compression_rate`` of its elements."""
    return (rows + cols) * rank * min_compression_rate < rows * cols


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Matrices of one shape, by their places in the bucket."""

    places: tuple[int, ...]
    rows: int
    cols: int
    rank: int
    left_offset: int
    right_offset: int

    def left(self, flat: Tensor) -> Tensor:
        """Their left factors, ``(count, rank, rows)``, in the tensor of all left factors."""
        return _cut(flat, self.left_offset, len(self.places), self.rank, self.rows)

    def right(self, flat: Tensor) -> Tensor:
        """Their right factors, ``(count, rank, cols)``, in the tensor of all right factors."""
        return _cut(flat, self.right_offset, len(self.places), self.rank, self.cols)


@dataclass(frozen=True)
class Family:
    """Factors of one rank and length that lie side by side."""

    offset: int
    count: int
    rank: int
    length: int

    def of(self, flat: Tensor) -> Tensor:
        """The factors, ``(count, rank, length)``."""
        return _cut(flat, self.offset, self.count, self.rank, self.length)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What becomes of each gradient of a bucket."""

    batches: tuple[Batch, ...]
    left_families: tuple[Family, ...]
    right_families: tuple[Family, ...]
    exact: tuple[int, ...]
    """Places of the gradients that are reduced as they are."""
    exact_numel: int
    numel: int
    """Elements of the bucket."""

    @property
    def left_numel(self) -> int:
        """Elements of all left factors."""
        return sum(len(batch.places) * batch.rank * batch.rows for batch in self.batches)

    @property
    def right_numel(self) -> int:
        """Elements of all right factors."""
        return sum(len(batch.places) * batch.rank * batch.cols for batch in self.batches)

    def __str__(self) -> str:
        compressed = sum(len(batch.places) for batch in self.batches)
        return (
            f"{self.numel} elements: {compressed} gradients as factors of {self.left_numel} + "
            f"{self.right_numel}, {len(self.exact)} exact of {self.exact_numel}"
        )


def make_plan(
    shapes: Sequence[Sequence[int]],
    *,
    rank: int,
    min_compression_rate: float,
    exact: AbstractSet[int] = frozenset(),
    batch_numel: float = math.inf,
) -> Plan:
    """The plan of a bucket.

    Args:
        shapes: of its gradients.
        rank: at most this many directions a matrix.
        min_compression_rate: see :func:`pays`.
        exact: places that are not to be compressed, whatever their shape.
        batch_numel: matrices of more elements than this are batches of their own.
    """
    matrices = {
        place: found
        for place, shape in enumerate(shapes)
        if place not in exact
        and (found := matrix_shape(shape)) is not None
        and pays(*found, rank, min_compression_rate)
    }

    def batch_key(place: int) -> tuple[int, int, int]:
        rows, cols = matrices[place]
        return rows, cols, place if rows * cols > batch_numel else -1

    alike = [tuple(places) for _, places in groupby(sorted(matrices, key=batch_key), key=batch_key)]
    batches = _lay_out([(places, *matrices[places[0]]) for places in alike], rank)
    kept = tuple(place for place in range(len(shapes)) if place not in matrices)
    return Plan(
        batches=batches,
        left_families=_families(batches, lambda batch: (batch.left_offset, batch.rank, batch.rows)),
        right_families=_families(batches, lambda batch: (batch.right_offset, batch.rank, batch.cols)),
        exact=kept,
        exact_numel=sum(math.prod(shapes[place]) for place in kept),
        numel=sum(math.prod(shape) for shape in shapes),
    )


def square_plan(numel: int, *, rank: int) -> Plan:
    """The plan of a bucket that is compressed as one square matrix, its end filled with zeros."""
    side = math.isqrt(max(numel - 1, 0)) + 1
    batches = _lay_out([((0,), side, side)], rank)
    family = Family(0, 1, batches[0].rank, side)
    return Plan(
        batches=batches,
        left_families=(family,),
        right_families=(family,),
        exact=(),
        exact_numel=0,
        numel=numel,
    )


def _lay_out(alike: Iterable[tuple[tuple[int, ...], int, int]], rank: int) -> tuple[Batch, ...]:
    """Batches with offsets such that left factors are sorted by rows and right ones by columns."""
    shapes = [(places, rows, cols, min(rank, rows, cols)) for places, rows, cols in alike]
    right_offsets: dict[tuple[int, ...], int] = {}
    end = 0
    for places, _, cols, own_rank in sorted(shapes, key=lambda shape: (shape[2], shape[3], shape[1], shape[0])):
        right_offsets[places] = end
        end += len(places) * own_rank * cols
    batches = []
    end = 0
    for places, rows, cols, own_rank in sorted(shapes, key=lambda shape: (shape[1], shape[3], shape[2], shape[0])):
        batches.append(
            Batch(
                places=places,
                rows=rows,
                cols=cols,
                rank=own_rank,
                left_offset=end,
                right_offset=right_offsets[places],
            )
        )
        end += len(places) * own_rank * rows
    return tuple(batches)


def _families(batches: Sequence[Batch], key: Callable[[Batch], tuple[int, int, int]]) -> tuple[Family, ...]:
    """Neighbours of one rank and length put together; ``key`` gives offset, rank and length."""
    families = []
    for (rank, length), members in groupby(sorted(batches, key=key), key=lambda batch: key(batch)[1:]):
        found = list(members)
        families.append(Family(key(found[0])[0], sum(len(batch.places) for batch in found), rank, length))
    return tuple(families)


def _cut(flat: Tensor, offset: int, count: int, rank: int, length: int) -> Tensor:
    return flat[offset : offset + count * rank * length].view(count, rank, length)
