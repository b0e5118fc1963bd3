"""Which gradients of a bucket are compressed, as which matrices, and where their factors are stored.

[Note: layout of factors]

A matrix M of n x m is approximated by P Q^T, with P the left factor and Q the right one. Both are stored transposed,
``(rank, n)`` and ``(rank, m)``, because products with a matrix are then several times faster on a CPU. Matrices of one
shape are a batch and are multiplied by one kernel. Factors of one rank and length, of any matrices, are orthonormalized
by one kernel. All left factors of a bucket are stored in one flat tensor and all right ones in another, sorted so that
either kind of batch is one view ``(count, rank, length)`` of it, and the flat tensor is sent as it is.

A layout follows from shapes and options alone, so it is the same on every rank.

[Note: where the gradient plus its residual is computed]

M is computed in the gradient's own memory: the bucket is overwritten by the output in the end anyway, and the residual
stays as it was until the step is known to be finite. So one matrix in the bucket's own precision takes no workspace.
For several of one shape, or half precision, which is computed in ``float32``, a copy is made for each product and
dropped before the stage waits for a collective: workspace never exceeds the bucket that is being compressed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from overlap._torch.device import has_streams
from overlap._torch.foreach import add_all, copy_all
from overlap.hooks.wires.feedback import within_range

__all__ = [
    "Batch",
    "BucketLayout",
    "FactorLayout",
    "Factors",
    "Matrices",
    "columns_by_shape",
    "layout_of",
    "matrix_shape",
]

# Elements of a block of rows that stays in a CPU's cache from one kernel to the next.
_BLOCK_NUMEL = 200 * 1024
# A product that sums over rows copies them into another order first, which is to stay in the cache, too.
_SUMMED_ROWS = 16
# Two products are written over a block of rows that is read.
_FINISHED_ROWS = 32
# On a CPU, copying larger matrices together takes longer than one more kernel.
_CPU_BATCH_NUMEL = 16 * 1024


class Batch(NamedTuple):
    """Matrices of one shape and the rank of their factors."""

    places: tuple[int, ...]
    """Of their gradients in the bucket."""
    rows: int
    cols: int
    rank: int


_View = tuple[int, tuple[int, int, int]]


@dataclass(frozen=True)
class FactorLayout:
    """Where the left or all right factors of a bucket are in their flat tensor: offsets and shapes of views."""

    is_left: bool
    of_batches: tuple[_View, ...]
    """Of each batch of matrices."""
    alike: tuple[_View, ...]
    """Of all factors of one rank and length."""
    numel: int

    @classmethod
    def of(cls, batches: Sequence[Batch], *, is_left: bool) -> FactorLayout:
        """The left or the right factors of ``batches``."""
        shapes = [(len(batch.places), batch.rank, batch.rows if is_left else batch.cols) for batch in batches]
        of_batches: dict[int, _View] = {}
        alike: list[_View] = []
        end = 0
        by_length = sorted(range(len(shapes)), key=lambda index: shapes[index][1:])
        for (rank, length), indices in groupby(by_length, key=lambda index: shapes[index][1:]):
            start = end
            for index in indices:
                of_batches[index] = (end, shapes[index])
                end += math.prod(shapes[index])
            alike.append((start, ((end - start) // (rank * length), rank, length)))
        return cls(is_left, tuple(of_batches[index] for index in range(len(shapes))), tuple(alike), end)


class Factors:
    """All left or all right factors of a bucket, views of ``flat``."""

    def __init__(self, layout: FactorLayout, flat: Tensor) -> None:
        self.layout = layout
        self.flat = flat
        self.of_batches = [flat.narrow(0, offset, math.prod(shape)).view(shape) for offset, shape in layout.of_batches]
        """Of each batch of matrices, ``(count, rank, length)``."""

    @property
    def alike(self) -> list[Tensor]:
        """All factors of one rank and length, ``(count, rank, length)``."""
        return [self.flat.narrow(0, offset, math.prod(shape)).view(shape) for offset, shape in self.layout.alike]


@dataclass(frozen=True)
class BucketLayout:
    """What becomes of each gradient of a bucket."""

    batches: tuple[Batch, ...]
    left: FactorLayout
    right: FactorLayout
    exact: tuple[int, ...]
    """Places of the gradients that are reduced as they are."""
    numel: int
    """Elements of the bucket."""


def layout_of(
    shapes: Sequence[Sequence[int]], *, rank: int, min_compression_rate: float, device: torch.device
) -> BucketLayout:
    """The layout of a bucket of gradients of ``shapes``.

    A gradient is compressed if its factors have fewer than ``1 / min_compression_rate`` of its elements.
    """
    batch_numel = math.inf if has_streams(device) else _CPU_BATCH_NUMEL
    alike: dict[tuple[int, int, int], list[int]] = {}
    exact = []
    for place, shape in enumerate(shapes):
        rows, cols = matrix_shape(shape)
        if len(shape) > 1 and (rows + cols) * rank * min_compression_rate < rows * cols:
            alone = place if rows * cols > batch_numel else -1
            alike.setdefault((rows, cols, alone), []).append(place)
        else:
            exact.append(place)
    batches = [
        Batch(tuple(places), rows, cols, min(rank, rows, cols)) for (rows, cols, _), places in sorted(alike.items())
    ]
    return BucketLayout(
        batches=tuple(batches),
        left=FactorLayout.of(batches, is_left=True),
        right=FactorLayout.of(batches, is_left=False),
        exact=tuple(exact),
        numel=sum(math.prod(shape) for shape in shapes),
    )


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a gradient as a matrix: its first dimension and all others.

    >>> matrix_shape((64, 3, 7, 7))
    (64, 147)
    """
    return math.prod(shape[:1]), math.prod(shape[1:])


class Matrices:
    """The matrices M = gradient + residual of one batch, and their products.

    One matrix too large for a CPU's caches is taken in blocks of rows: its memory is read once, not twice.

    Args:
        batch: their shape.
        gradients: to compress; overwritten with the output.
        residuals: shaped and strided as ``gradients``; ``None`` without error feedback.
        dtype: to compute in.
    """

    def __init__(
        self, batch: Batch, gradients: Sequence[Tensor], residuals: Sequence[Tensor] | None, dtype: torch.dtype
    ) -> None:
        self._gradients = [_as_matrix(gradient) for gradient in gradients]
        self._residuals = None if residuals is None else [_as_matrix(residual) for residual in residuals]
        self._dtype = dtype
        first, numel = self._gradients[0], batch.rows * batch.cols
        self._is_in_place = first.dtype == dtype
        # Whether residuals are yet to be added to the gradients.
        self._is_pending = self._is_in_place and residuals is not None
        self._is_alone = self._is_in_place and len(gradients) == 1
        self._is_large = self._is_alone and numel > _BLOCK_NUMEL and not has_streams(first.device)

    def times(self, q: Tensor, *, out: Tensor) -> None:
        """P = M Q: left factors ``(count, rank, rows)`` from right ones ``(count, rank, cols)``."""
        if not self._is_large:
            torch.bmm(q, self._load().mT, out=out)
            return
        block_rows = max(1, _BLOCK_NUMEL // q.shape[2])
        columns = out[0].split(block_rows, dim=1)
        for block, column in zip(self._blocks(block_rows), columns, strict=True):
            torch.mm(q[0], block.t(), out=column)

    def transposed_times(self, p: Tensor, *, out: Tensor) -> None:
        """Q = M^T P: right factors ``(count, rank, cols)`` from left ones ``(count, rank, rows)``."""
        if not self._is_large:
            torch.bmm(p, self._load(), out=out)
            return
        columns = p[0].split(_SUMMED_ROWS, dim=1)
        total = out[0].zero_()
        for block, column in zip(self._blocks(_SUMMED_ROWS), columns, strict=True):
            total.addmm_(column, block)

    def _blocks(self, rows: int) -> Iterator[Tensor]:
        """The one matrix in blocks of ``rows``; the residual is added to each of them while it is in the cache."""
        is_pending, self._is_pending = self._is_pending, False
        residuals = self._residuals[0].split(rows) if is_pending and self._residuals else itertools.repeat(None)
        for block, residual in zip(self._gradients[0].split(rows), residuals, strict=False):
            yield block if residual is None else block.add_(residual)

    def _load(self) -> Tensor:
        """M, ``(count, rows, cols)``: a copy, unless one matrix is alone."""
        if self._is_pending and self._residuals is not None:
            self._is_pending = False
            add_all(self._gradients, self._residuals)
        if self._is_alone:
            return self._gradients[0][None]
        matrices = torch.stack(self._gradients).to(self._dtype)
        if self._residuals is not None and not self._is_in_place:
            add_all(matrices.unbind(), self._residuals)
        return matrices

    def decompress(self, own: tuple[Tensor, Tensor], mean: tuple[Tensor, Tensor], is_finite: Tensor | None) -> None:
        """Write P Q^T of the ``mean`` factors to the gradients and M - P Q^T of this rank's ``own`` to the residuals.

        ``is_finite``, shape ``(count,)``: the matrices that are finite on all ranks; the others come out as NaN and
        keep their residuals. ``None``: all are.
        """
        if self._is_large and is_finite is None:
            self._decompress_blocks(own, mean)
            return
        matrices = self._load()
        if self._residuals is not None:
            if self._is_alone and is_finite is None and self._residuals[0].dtype == self._dtype:
                torch.baddbmm(matrices, own[0].mT, own[1], alpha=-1, out=self._residuals[0][None])
            else:
                matrices.baddbmm_(own[0].mT, own[1], alpha=-1)
                _write_residuals(self._residuals, matrices.unbind(), is_finite)
        output = torch.bmm(mean[0].mT, mean[1], out=matrices)
        if is_finite is not None:
            output.masked_fill_(~is_finite[:, None, None], torch.nan)
        if not self._is_alone:
            copy_all(self._gradients, output.unbind())

    def _decompress_blocks(self, own: tuple[Tensor, Tensor], mean: tuple[Tensor, Tensor]) -> None:
        own_rows, mean_rows = own[0][0].t().split(_FINISHED_ROWS), mean[0][0].t().split(_FINISHED_ROWS)
        residuals = itertools.repeat(None) if self._residuals is None else self._residuals[0].split(_FINISHED_ROWS)
        blocks = zip(self._gradients[0].split(_FINISHED_ROWS), own_rows, mean_rows, residuals, strict=False)
        for matrix, own_p, mean_p, residual in blocks:
            if residual is not None and residual.dtype == matrix.dtype:
                torch.addmm(matrix, own_p, own[1][0], alpha=-1, out=residual)
            elif residual is not None:
                residual.copy_(within_range(torch.addmm(matrix, own_p, own[1][0], alpha=-1), residual.dtype))
            torch.mm(mean_p, mean[1][0], out=matrix)


def _write_residuals(residuals: Sequence[Tensor], found: Sequence[Tensor], is_finite: Tensor | None) -> None:
    """Overwrite the residuals of finite matrices, without asking on the host which ones are finite."""
    # Two gradients that cancel in the mean can leave more than half precision holds.
    found = [within_range(new, residuals[0].dtype) for new in found]
    if is_finite is None:
        copy_all(residuals, found)
        return
    for residual, new, finite in zip(residuals, found, is_finite.unbind(), strict=True):
        residual.copy_(torch.where(finite, new, residual))


def _as_matrix(gradient: Tensor) -> Tensor:
    """A view ``(rows, cols)`` of a gradient of two or more dimensions, as it is stored in memory.

    In memory formats such as channels-last the columns of a row are in another order than in the shape, which is the
    same on all ranks and changes no product.
    """
    if gradient.ndim == 2:
        return gradient
    rows, cols = matrix_shape(gradient.shape)
    return gradient.as_strided((rows, cols), (cols, 1))


def columns_by_shape(factor: Tensor, gradient: Tensor) -> Tensor:
    """A right factor ``(rank, cols)`` of ``gradient``, with its columns in the order of the gradient's shape.

    A view ``(rank, *gradient.shape[1:])`` where memory has them in another order; else ``factor`` itself.
    """
    cols = factor.shape[1]
    if gradient.ndim == 2 or gradient.stride(0) != cols or gradient.is_contiguous():
        return factor
    strides = (cols, *gradient.stride()[1:])
    return factor.as_strided((len(factor), *gradient.shape[1:]), strides, factor.storage_offset())
