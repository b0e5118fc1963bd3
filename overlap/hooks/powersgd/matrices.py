"""The matrices of a bucket, gradient plus residual each: what is multiplied, and where the results go.

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
from collections.abc import Sequence

import torch
from torch import Tensor

from overlap._torch.device import has_streams
from overlap._torch.foreach import add_all, copy_all
from overlap.hooks.bucket import Bucket
from overlap.hooks.powersgd.checkpoint import within_range
from overlap.hooks.powersgd.config import Dtypes, PowerSGDConfig
from overlap.hooks.powersgd.layout import BucketLayout, MatrixBatch, layout_of
from overlap.hooks.powersgd.memory import Memory
from overlap.hooks.powersgd.slot import Slot, as_matrix

__all__ = ["Factors", "Matrices", "PerParameter", "keep_residuals", "residuals_like"]

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


class PerParameter:
    """How a bucket becomes matrices: each gradient is a matrix of its own."""

    name = "PowerSGD"
    """What the stage is called."""

    def lay_out(self, bucket: Bucket, config: PowerSGDConfig, ranks: Sequence[int]) -> BucketLayout:
        """The layout of a bucket."""
        return layout_of(
            [gradient.shape for gradient in bucket.gradients],
            ranks=ranks,
            min_compression_rate=config.min_compression_rate,
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
