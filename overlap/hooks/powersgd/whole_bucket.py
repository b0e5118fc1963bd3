"""The form of ``batched_powerSGD_hook``: a whole bucket as one square matrix, its end filled with zeros."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from overlap._torch.foreach import add_all
from overlap.errors import ConfigurationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.powersgd.config import Dtypes, PowerSGDConfig
from overlap.hooks.powersgd.layout import BucketLayout, FactorBatch, MatrixBatch
from overlap.hooks.powersgd.matrices import Factors, Matrices, PerParameter, keep_residuals, residuals_like
from overlap.hooks.powersgd.memory import Memory
from overlap.hooks.powersgd.slot import Slot

__all__ = ["WholeBucket", "square_layout"]


class WholeBucket(PerParameter):
    """A whole bucket is one matrix."""

    name = "PowerSGD, whole buckets"

    def lay_out(self, bucket: Bucket, config: PowerSGDConfig, ranks: Sequence[int]) -> BucketLayout:
        if len(set(ranks)) > 1:
            raise ConfigurationError(
                f"{bucket!r} is one matrix, and its parameters have the ranks {sorted(set(ranks))}: give one rank, "
                "or use powerSGD_hook"
            )
        return square_layout(bucket.buffer.numel(), rank=ranks[0])

    def matrices(
        self, bucket: Bucket, layout: BucketLayout, keys: tuple[str, ...], memory: Memory, dtypes: Dtypes
    ) -> list[Matrices]:
        (batch,) = layout.batches
        factor_slot = memory.bucket_slot(keys)
        if factor_slot.factor is not None and factor_slot.factor.shape[1] != batch.cols:
            factor_slot.factor = None  # Of a bucket that was cut in another way.
        return [_SquareMatrix(batch, factor_slot, bucket, memory.slots_of(keys), dtypes)]


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
