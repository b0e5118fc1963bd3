"""Which gradients of a bucket are compressed, and where their factors lie in what is sent.

[Note: layout of factors]

A matrix M of n x m is approximated by P Q^T, with P the left factor and Q the right one. They are stored with their
directions in rows, ``(rank, n)`` and ``(rank, m)``, because products with a matrix are then several times faster on a
CPU than with directions in columns. Matrices of one shape form a :class:`MatrixBatch` and are multiplied by one kernel.
Factors of one rank and length, of any matrices, form a :class:`FactorBatch` and are orthonormalized by one kernel. All
left factors of a bucket lie in one flat tensor and all right ones in another, sorted so that each batch of either kind
is one view ``(count, rank, length)`` of it. So what is sent never has to be put together from parts.

Everything here follows from shapes and options alone, so it is the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

__all__ = ["BucketLayout", "FactorBatch", "MatrixBatch", "layout_of", "matrix_shape", "pays"]


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
class MatrixBatch:
    """Matrices of one shape, by their places in the bucket, and where their factors lie."""

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

    def factors(self, flat: Tensor, *, is_left: bool) -> Tensor:
        """Their left or their right factors in ``flat``."""
        return self.left(flat) if is_left else self.right(flat)


@dataclass(frozen=True)
class FactorBatch:
    """Factors of one rank and length that lie side by side, whatever matrices they belong to."""

    offset: int
    count: int
    rank: int
    length: int

    def of(self, flat: Tensor) -> Tensor:
        """The factors, ``(count, rank, length)``."""
        return _cut(flat, self.offset, self.count, self.rank, self.length)


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """What becomes of each gradient of a bucket."""

    batches: tuple[MatrixBatch, ...]
    left_factors: tuple[FactorBatch, ...]
    right_factors: tuple[FactorBatch, ...]
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

    def factors(self, *, is_left: bool) -> tuple[FactorBatch, ...]:
        """The batches of all left or of all right factors."""
        return self.left_factors if is_left else self.right_factors

    def __str__(self) -> str:
        compressed = sum(len(batch.places) for batch in self.batches)
        return (
            f"{self.numel} elements: {compressed} gradients as factors of {self.left_numel} + "
            f"{self.right_numel}, {len(self.exact)} exact of {self.exact_numel}"
        )


def layout_of(
    shapes: Sequence[Sequence[int]],
    *,
    ranks: Sequence[int],
    min_compression_rate: float,
    batch_numel: float = math.inf,
) -> BucketLayout:
    """The layout of a bucket in which each gradient is a matrix of its own.

    Args:
        shapes: of its gradients.
        ranks: of each gradient, at most this many directions.
        min_compression_rate: see :func:`pays`.
        batch_numel: matrices of more elements than this are batches of their own.
    """
    matrices = {
        place: found
        for place, shape in enumerate(shapes)
        if (found := matrix_shape(shape)) is not None and pays(*found, ranks[place], min_compression_rate)
    }

    def batch_key(place: int) -> tuple[int, int, int, int]:
        rows, cols = matrices[place]
        return rows, cols, min(ranks[place], rows, cols), place if rows * cols > batch_numel else -1

    alike = [tuple(places) for _, places in groupby(sorted(matrices, key=batch_key), key=batch_key)]
    batches = _lay_out([(places, *batch_key(places[0])[:3]) for places in alike])
    kept = tuple(place for place in range(len(shapes)) if place not in matrices)
    return BucketLayout(
        batches=batches,
        left_factors=_factor_batches(batches, lambda batch: (batch.left_offset, batch.rank, batch.rows)),
        right_factors=_factor_batches(batches, lambda batch: (batch.right_offset, batch.rank, batch.cols)),
        exact=kept,
        exact_numel=sum(math.prod(shapes[place]) for place in kept),
        numel=sum(math.prod(shape) for shape in shapes),
    )


def _lay_out(alike: Iterable[tuple[tuple[int, ...], int, int, int]]) -> tuple[MatrixBatch, ...]:
    """Batches of ``(places, rows, cols, rank)`` with left factors sorted by rows and right ones by columns."""
    shapes = list(alike)
    right_offsets: dict[tuple[int, ...], int] = {}
    end = 0
    for places, _, cols, own_rank in sorted(shapes, key=lambda shape: (shape[2], shape[3], shape[1], shape[0])):
        right_offsets[places] = end
        end += len(places) * own_rank * cols
    batches = []
    end = 0
    for places, rows, cols, own_rank in sorted(shapes, key=lambda shape: (shape[1], shape[3], shape[2], shape[0])):
        batches.append(
            MatrixBatch(
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


def _factor_batches(
    batches: Sequence[MatrixBatch], key: Callable[[MatrixBatch], tuple[int, int, int]]
) -> tuple[FactorBatch, ...]:
    """Neighbours of one rank and length put together; ``key`` gives offset, rank and length."""
    found = []
    for (rank, length), members in groupby(sorted(batches, key=key), key=lambda batch: key(batch)[1:]):
        alike = list(members)
        found.append(FactorBatch(key(alike[0])[0], sum(len(batch.places) for batch in alike), rank, length))
    return tuple(found)


def _cut(flat: Tensor, offset: int, count: int, rank: int, length: int) -> Tensor:
    return flat[offset : offset + count * rank * length].view(count, rank, length)
