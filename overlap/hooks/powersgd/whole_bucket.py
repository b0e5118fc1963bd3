"""The form of ``batched_powerSGD_hook``: a whole bucket as one square matrix, its end filled with zeros."""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor

from overlap._torch.foreach import add_all
from overlap.hooks.bucket import Bucket
from overlap.hooks.powersgd.layout import BucketLayout, FactorBatch, MatrixBatch, layout_of
from overlap.hooks.powersgd.matrices import Factors, Matrices, keep_residuals
from overlap.hooks.powersgd.memory import Memory, Slot

__all__ = ["WholeBucket", "square_layout"]


class WholeBucket:
    """A whole bucket is one matrix; where all its parameters are bypassed, it is reduced exactly."""

    name = "PowerSGD, whole buckets"

    def lay_out(
        self, bucket: Bucket, *, rank: int, min_compression_rate: float, exact: AbstractSet[int]
    ) -> BucketLayout:
        if len(exact) < len(bucket.gradients):
            return square_layout(bucket.buffer.numel(), rank=rank)
        shapes = [gradient.shape for gradient in bucket.gradients]
        return layout_of(shapes, rank=rank, min_compression_rate=min_compression_rate, exact=exact)

    def matrices(
        self,
        bucket: Bucket,
        layout: BucketLayout,
        keys: tuple[str, ...],
        memory: Memory,
        *,
        compute_dtype: torch.dtype,
        residual_dtype: torch.dtype | None,
    ) -> list[Matrices]:
        (batch,) = layout.batches
        factor_slot = memory.bucket_slot(keys)
        if factor_slot.factor is not None and tuple(factor_slot.factor.shape) != (batch.rank, batch.cols):
            factor_slot.factor = None  # Of a bucket that was cut in another way.
        square = _SquareMatrix(
            batch,
            factor_slot,
            bucket,
            memory.slots_of(keys),
            compute_dtype=compute_dtype,
            residual_dtype=residual_dtype,
        )
        return [square]


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


class _SquareMatrix(Matrices):
    """The matrix of a whole bucket.

    Args:
        batch: of this matrix alone.
        factor_slot: of its factor.
        bucket: whose parameters' residuals are kept one by one, since buckets change.
        slots: of its parameters.
        compute_dtype: what products are computed in.
        residual_dtype: of the residuals; ``None`` for no error feedback.
    """

    def __init__(
        self,
        batch: MatrixBatch,
        factor_slot: Slot,
        bucket: Bucket,
        slots: Sequence[Slot],
        *,
        compute_dtype: torch.dtype,
        residual_dtype: torch.dtype | None,
    ) -> None:
        super().__init__(batch, [factor_slot])
        self._bucket = bucket
        self._compute_dtype = compute_dtype
        self._residuals = (
            None
            if residual_dtype is None
            else [
                slot.residual_like(gradient, residual_dtype)
                for slot, gradient in zip(slots, bucket.gradients, strict=True)
            ]
        )

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
