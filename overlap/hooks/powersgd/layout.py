"""A bucket as matrices: which gradients are compressed, where their factors lie, what is multiplied.

[Note: layout of factors]

A matrix M of n x m is approximated by P Q^T, with P the left factor and Q the right one. They are stored with their
directions in rows, ``(rank, n)`` and ``(rank, m)``, because products with a matrix are then several times faster on a
CPU than with directions in columns. Matrices of one shape form a :class:`MatrixBatch` and are multiplied by one kernel.
Factors of one rank and length, of any matrices, form a :class:`FactorBatch` and are orthonormalized by one kernel. All
left factors of a bucket lie in one flat tensor and all right ones in another, sorted so that each batch of either kind
is one view ``(count, rank, length)`` of it. So what is sent never has to be put together from parts.

A layout follows from shapes and options alone, so it is the same on every rank.

[Note: where the gradient plus its residual lives]

The matrix that is compressed, gradient plus residual, is computed in the gradient's own memory: the bucket is
overwritten by the output in the end anyway, and the residual stays as it was until the step is known to be finite. So a
matrix in the bucket's own precision takes no workspace at all. Where several of one shape are multiplied by one kernel,
or where half precision is computed in ``float32``, a copy is made for each product and dropped before the stage waits
for a collective: workspace never exceeds the bucket that is being compressed, however many buckets are in flight.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from overlap._torch.device import has_streams
from overlap._torch.foreach import add_all, copy_all
from overlap.hooks.bucket import Bucket
from overlap.hooks.powersgd.memory import Memory, Slot, as_matrix, within_range

__all__ = [
    "BucketLayout",
    "Dtypes",
    "FactorBatch",
    "Factors",
    "MatrixBatch",
    "Matrices",
    "PerParameter",
    "WholeBucket",
    "layout_of",
    "matrix_shape",
    "pays",
    "square_layout",
]

# Elements of a block of rows that stays in a CPU's cache from one kernel to the next.
_BLOCK_NUMEL = 200 * 1024
# A product that sums over rows copies them into another order first, which is to stay in the cache, too.
_SUMMED_ROWS = 16
# Two products are written over a block of rows that is read.
_FINISHED_ROWS = 32
# On a CPU, copying larger matrices together takes longer than one more kernel.
_CPU_BATCH_NUMEL = 16 * 1024
# Left factors (count, rank, rows) and right ones (count, rank, cols), whose product approximates the matrices.
Factors = tuple[Tensor, Tensor]


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
    rank: int,
    min_compression_rate: float,
    batch_numel: float = math.inf,
) -> BucketLayout:
    """The layout of a bucket in which each gradient is a matrix of its own.

    Args:
        shapes: of its gradients.
        rank: at most this many directions of each gradient.
        min_compression_rate: see :func:`pays`.
        batch_numel: matrices of more elements than this are batches of their own.
    """
    matrices = {
        place: found
        for place, shape in enumerate(shapes)
        if (found := matrix_shape(shape)) is not None and pays(*found, rank, min_compression_rate)
    }

    def batch_key(place: int) -> tuple[int, int, int, int]:
        rows, cols = matrices[place]
        return rows, cols, min(rank, rows, cols), place if rows * cols > batch_numel else -1

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


def square_layout(numel: int, *, rank: int) -> BucketLayout:
    """The layout of a bucket of ``numel`` elements as one square matrix."""
    side = math.isqrt(max(numel - 1, 0)) + 1
    own_rank = min(rank, side)
    factors = (FactorBatch(0, 1, own_rank, side),)
    return BucketLayout(
        batches=(MatrixBatch(places=(0,), rows=side, cols=side, rank=own_rank, left_offset=0, right_offset=0),),
        left_factors=factors,
        right_factors=factors,
        exact=(),
        exact_numel=0,
        numel=numel,
    )


class Dtypes(NamedTuple):
    """What a bucket's products are computed in and its residuals kept in; ``None``: no error feedback."""

    compute: torch.dtype
    residual: torch.dtype | None


class Matrices(ABC):
    """The matrices M of one batch; ``factor_slots``, one per matrix, remember their factors."""

    def __init__(self, batch: MatrixBatch, factor_slots: Sequence[Slot]) -> None:
        self.batch = batch
        self.factor_slots = factor_slots

    def begin(self) -> None:  # noqa: B027 (most have nothing to prepare)
        """Add the residual to the gradient where that is done in place; called once, before any product."""

    @abstractmethod
    def load(self) -> Tensor:
        """Gradient plus residual, ``(count, rows, cols)``; may be overwritten from :meth:`finish` on."""

    def multiply(self, right: Tensor, *, out: Tensor) -> None:
        """P = M Q: left factors ``(count, rank, rows)`` from right ones ``(count, rank, cols)``."""
        torch.bmm(right, self.load().mT, out=out)

    def multiply_transposed(self, left: Tensor, *, out: Tensor) -> None:
        """Q = M^T P: right factors ``(count, rank, cols)`` from left ones ``(count, rank, rows)``."""
        torch.bmm(left, self.load(), out=out)

    @abstractmethod
    def finish(self, own: Factors, mean: Factors, is_finite: Tensor | None) -> None:
        """Write ``mean`` into the gradients and what ``own`` leaves out into the residuals.

        ``is_finite``, shape ``(count,)``, tells which matrices were finite on all ranks; the others come out as NaN
        and keep their residuals. ``None``: all of them.
        """


class StackedMatrices(Matrices):
    """Gradients of one shape; one alone, in the precision of the computation, needs no copy."""

    def __init__(self, batch: MatrixBatch, gradients: Sequence[Tensor], slots: Sequence[Slot], dtypes: Dtypes) -> None:
        super().__init__(batch, slots)
        for slot, gradient in zip(slots, gradients, strict=True):
            slot.arrange(gradient)
        self._gradients = [as_matrix(gradient) for gradient in gradients]
        self._compute_dtype = dtypes.compute
        self._has_sum = gradients[0].dtype == dtypes.compute
        self._is_new = [slot.residual is None for slot in slots]
        residuals = residuals_like(gradients, slots, dtypes.residual)
        self._residuals = None if residuals is None else [as_matrix(residual) for residual in residuals]

    def begin(self) -> None:
        if self._has_sum and self._residuals is not None and not all(self._is_new):
            add_all(self._gradients, self._residuals)

    def load(self) -> Tensor:
        if self._has_sum:
            return self._gradients[0][None] if len(self._gradients) == 1 else torch.stack(self._gradients)
        matrices = torch.stack(self._gradients).to(self._compute_dtype)
        if self._residuals is not None:
            add_all(matrices.unbind(), self._residuals)
        return matrices

    def finish(self, own: Factors, mean: Factors, is_finite: Tensor | None) -> None:
        matrices = self.load()
        if self._residuals is not None:
            first = self._residuals[0]
            if is_finite is None and len(self._residuals) == 1 and first.dtype == matrices.dtype:
                torch.baddbmm(matrices, own[0].mT, own[1], alpha=-1, out=first[None])
            else:
                matrices.baddbmm_(own[0].mT, own[1], alpha=-1)
                keep_residuals(self._residuals, matrices.unbind(), is_finite)
        output = torch.bmm(mean[0].mT, mean[1], out=matrices)
        if is_finite is not None:
            output.masked_fill_(~is_finite[:, None, None], torch.nan)
        if output.data_ptr() != self._gradients[0].data_ptr():
            copy_all(self._gradients, output.unbind())


class LargeMatrix(StackedMatrices):
    """One matrix too large for a CPU's caches, taken in blocks of rows: its memory is read once, not twice.

    Its gradient has the dtype of the computation.
    """

    def __init__(self, batch: MatrixBatch, gradients: Sequence[Tensor], slots: Sequence[Slot], dtypes: Dtypes) -> None:
        super().__init__(batch, gradients, slots, dtypes)
        self._block_rows = max(1, _BLOCK_NUMEL // batch.cols)
        self._has_begun = False

    def begin(self) -> None:
        """The residual is added with the first product."""

    def multiply(self, right: Tensor, *, out: Tensor) -> None:
        if self._residuals is None or self._has_begun or self._is_new[0]:
            super().multiply(right, out=out)
            return
        self._has_begun = True
        columns = out[0].split(self._block_rows, dim=1)
        for matrix, residual, column in zip(*self._split(self._block_rows), columns, strict=True):
            torch.mm(right[0], matrix.add_(residual).t(), out=column)

    def multiply_transposed(self, left: Tensor, *, out: Tensor) -> None:
        begins = not (self._residuals is None or self._has_begun or self._is_new[0])
        self._has_begun = True
        residuals = self._residuals[0].split(_SUMMED_ROWS) if begins and self._residuals else itertools.repeat(None)
        matrices, columns = self._gradients[0].split(_SUMMED_ROWS), left[0].split(_SUMMED_ROWS, dim=1)
        total = out[0].zero_()
        for matrix, column, residual in zip(matrices, columns, residuals, strict=False):
            if residual is not None:
                matrix.add_(residual)
            total.addmm_(column, matrix)

    def finish(self, own: Factors, mean: Factors, is_finite: Tensor | None) -> None:
        if self._residuals is None or is_finite is not None:
            super().finish(own, mean, is_finite)
            return
        parts = (factors[0].t().split(_FINISHED_ROWS) for factors in (own[0], mean[0]))
        for matrix, residual, own_left, mean_left in zip(*self._split(_FINISHED_ROWS), *parts, strict=True):
            if residual.dtype == matrix.dtype:
                torch.addmm(matrix, own_left, own[1][0], alpha=-1, out=residual)
            else:
                left_out = torch.addmm(matrix, own_left, own[1][0], alpha=-1)
                residual.copy_(within_range(left_out, residual.dtype))
            torch.mm(mean_left, mean[1][0], out=matrix)

    def _split(self, rows: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        assert self._residuals is not None
        return self._gradients[0].split(rows), self._residuals[0].split(rows)


class _SquareMatrix(Matrices):
    """The matrix of a whole bucket; its parameters' residuals are kept one by one, since buckets change."""

    def __init__(
        self, batch: MatrixBatch, factor_slot: Slot, bucket: Bucket, slots: Sequence[Slot], dtypes: Dtypes
    ) -> None:
        super().__init__(batch, [factor_slot])
        self._bucket = bucket
        self._compute_dtype = dtypes.compute
        self._residuals = residuals_like(bucket.gradients, slots, dtypes.residual)

    def load(self) -> Tensor:
        buffer, side = self._bucket.buffer, self.batch.rows
        flat = torch.zeros(side * side, dtype=self._compute_dtype, device=buffer.device)
        flat[: buffer.numel()].copy_(buffer)
        if self._residuals is not None:
            add_all(self._parts(flat), self._residuals)
        return flat.view(1, side, side)

    def finish(self, own: Factors, mean: Factors, is_finite: Tensor | None) -> None:
        matrix = self.load()
        if self._residuals is not None:
            matrix.baddbmm_(own[0].mT, own[1], alpha=-1)
            parts = self._parts(matrix.view(-1))
            keep_residuals(self._residuals, parts, None if is_finite is None else is_finite.expand(len(parts)))
        output = torch.bmm(mean[0].mT, mean[1], out=matrix).view(-1)[: self._bucket.buffer.numel()]
        if is_finite is not None:
            output = torch.where(is_finite, output, torch.nan)
        self._bucket.buffer.copy_(output)

    def _parts(self, flat: Tensor) -> tuple[Tensor, ...]:
        return self._bucket.with_buffer(flat[: self._bucket.buffer.numel()]).gradients


def residuals_like(
    gradients: Sequence[Tensor], slots: Sequence[Slot], dtype: torch.dtype | None
) -> list[Tensor] | None:
    """The residuals of gradients; ``None`` without error feedback."""
    if dtype is None:
        return None
    return [slot.residual_like(gradient, dtype) for slot, gradient in zip(slots, gradients, strict=True)]


def keep_residuals(residuals: Sequence[Tensor], found: Sequence[Tensor], is_finite: Tensor | None) -> None:
    """Overwrite the residuals of finite matrices, without asking on the host which ones are finite."""
    # Two gradients that cancel in the mean can leave more than half precision holds.
    found = [within_range(new, residuals[0].dtype) for new in found]
    if is_finite is None:
        copy_all(residuals, found)
        return
    for residual, new, finite in zip(residuals, found, is_finite.unbind(), strict=True):
        residual.copy_(torch.where(finite, new, residual))


class PerParameter:
    """How a bucket becomes matrices: each gradient is a matrix of its own."""

    name = "PowerSGD"
    """What the stage is called."""

    def lay_out(self, bucket: Bucket, *, rank: int, min_compression_rate: float) -> BucketLayout:
        """The layout of a bucket."""
        return layout_of(
            [gradient.shape for gradient in bucket.gradients],
            rank=rank,
            min_compression_rate=min_compression_rate,
            batch_numel=math.inf if has_streams(bucket.buffer.device) else _CPU_BATCH_NUMEL,
        )

    def matrices(
        self, bucket: Bucket, layout: BucketLayout, keys: tuple[str, ...], memory: Memory, dtypes: Dtypes
    ) -> list[Matrices]:
        """The matrices of each batch of ``layout``; ``keys`` are what ``memory`` calls the bucket's parameters."""
        slots = memory.slots_of(keys)
        found: list[Matrices] = []
        for batch in layout.batches:
            gradients = [bucket.gradients[place] for place in batch.places]
            first = gradients[0]
            is_large = not has_streams(first.device) and first.numel() > _BLOCK_NUMEL and len(gradients) == 1
            kind = LargeMatrix if is_large and first.dtype == dtypes.compute else StackedMatrices
            found.append(kind(batch, gradients, [slots[place] for place in batch.places], dtypes))
        return found


class WholeBucket(PerParameter):
    """A whole bucket is one matrix."""

    name = "PowerSGD, whole buckets"

    def lay_out(self, bucket: Bucket, *, rank: int, min_compression_rate: float) -> BucketLayout:
        return square_layout(bucket.buffer.numel(), rank=rank)

    def matrices(
        self, bucket: Bucket, layout: BucketLayout, keys: tuple[str, ...], memory: Memory, dtypes: Dtypes
    ) -> list[Matrices]:
        (batch,) = layout.batches
        factor_slot = memory.bucket_slot(keys)
        if factor_slot.factor is not None and factor_slot.factor.shape[1] != batch.cols:
            factor_slot.factor = None  # Of a bucket that was cut in another way.
        return [_SquareMatrix(batch, factor_slot, bucket, memory.slots_of(keys), dtypes)]
