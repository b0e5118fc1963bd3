"""Gradients as batches of matrices: what is compressed, and where the results go.

[Note: where the gradient plus its residual lives]

The matrix that is compressed, gradient plus residual, is computed in the gradient's own memory: the bucket is
overwritten by the output in the end anyway, and the residual stays what it was until the step is known to be
sound. So a matrix in the wire's precision takes no workspace at all. Where several of one shape are
multiplied by one kernel, or where half precision is computed in ``float32``, a copy is made for each product
and dropped before the stage waits for a collective: workspace never exceeds the bucket that is at work,
however many buckets are on their way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from overlap._torch.foreach import add_all, copy_all
from overlap.hooks.bucket import Bucket
from overlap.hooks.powersgd.memory import Slot
from overlap.hooks.powersgd.plan import Plan

__all__ = ["Approximation", "Operand", "Square", "Stack", "as_matrix", "make_operands"]

# Elements of a block of rows that stays in a CPU's cache from one kernel to the next.
_BLOCK_NUMEL = 200 * 1024
# Left factors (count, rank, rows) and right ones (count, rank, cols), whose product approximates the
# matrices.
Approximation = tuple[Tensor, Tensor]


def as_matrix(gradient: Tensor) -> Tensor:
    """A view ``(rows, cols)`` of a gradient of two or more dimensions, as it lies in memory.

    In memory formats such as channels-last the columns of a row are in another order than in the shape, which
    is the same on all ranks and changes no product.
    """
    if gradient.ndim == 2:
        return gradient
    rows = gradient.shape[0]
    cols = gradient.numel() // rows
    return gradient.as_strided((rows, cols), (cols, 1))


class Operand(ABC):
    """Matrices of one shape."""

    def begin(self) -> None:  # noqa: B027 (most have nothing to prepare)
        """Called once, before any product."""

    @abstractmethod
    def load(self) -> Tensor:
        """Gradient plus residual, ``(count, rows, cols)``; may be overwritten from :meth:`finish` on."""

    def left(self, right: Tensor, *, out: Tensor) -> None:
        """The left factors ``(count, rank, rows)`` that belong to right ones."""
        torch.bmm(right, self.load().mT, out=out)

    def right(self, left: Tensor, *, out: Tensor) -> None:
        """The right factors ``(count, rank, cols)`` that belong to left ones."""
        torch.bmm(left, self.load(), out=out)

    @abstractmethod
    def finish(self, own: Approximation, mean: Approximation, is_sound: Tensor | None) -> None:
        """Write ``mean`` into the gradients and what ``own`` leaves out into the residuals.

        ``is_sound``, shape ``(count,)``, tells which matrices were finite on all ranks; the others come out
        as NaN and keep their residuals. ``None``: all of them.
        """


class Stack(Operand):
    """Gradients of one shape; one alone, in the precision of the computation, needs no copy.

    Args:
        gradients: shaped as their parameters.
        slots: of their parameters.
        compute_dtype: what products are computed in.
        residual_dtype: of the residuals; ``None`` for no error feedback.
    """

    def __init__(
        self,
        gradients: Sequence[Tensor],
        slots: Sequence[Slot],
        *,
        compute_dtype: torch.dtype,
        residual_dtype: torch.dtype | None,
    ) -> None:
        self._gradients = [as_matrix(gradient) for gradient in gradients]
        self._compute_dtype = compute_dtype
        self._has_sum = gradients[0].dtype == compute_dtype
        self._is_new = [slot.residual is None for slot in slots]
        self._residuals = (
            None
            if residual_dtype is None
            else [
                as_matrix(slot.residual_like(gradient, residual_dtype))
                for slot, gradient in zip(slots, gradients, strict=True)
            ]
        )

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

    def finish(self, own: Approximation, mean: Approximation, is_sound: Tensor | None) -> None:
        matrices = self.load()
        if self._residuals is not None:
            first = self._residuals[0]
            if is_sound is None and len(self._residuals) == 1 and first.dtype == matrices.dtype:
                torch.baddbmm(matrices, own[0].mT, own[1], alpha=-1, out=first[None])
            else:
                matrices.baddbmm_(own[0].mT, own[1], alpha=-1)
                keep(self._residuals, matrices.unbind(), is_sound)
        output = torch.bmm(mean[0].mT, mean[1], out=matrices)
        if is_sound is not None:
            output.masked_fill_(~is_sound[:, None, None], torch.nan)
        if output.data_ptr() != self._gradients[0].data_ptr():
            copy_all(self._gradients, output.unbind())


class Blocks(Stack):
    """One matrix too large for a CPU's caches, taken in blocks of rows: one way through memory, not two.

    Takes what a :class:`Stack` takes, but one gradient, in the precision of the computation and the residual.
    """

    def __init__(self, gradient: Tensor, slot: Slot, *, residual_dtype: torch.dtype | None) -> None:
        super().__init__([gradient], [slot], compute_dtype=gradient.dtype, residual_dtype=residual_dtype)
        rows, cols = self._gradients[0].shape
        self._block_rows = max(1, _BLOCK_NUMEL * rows // (rows * cols))
        self._has_begun = False

    def begin(self) -> None:
        """The residual is added with the first product."""

    def left(self, right: Tensor, *, out: Tensor) -> None:
        if self._residuals is None or self._has_begun or self._is_new[0]:
            super().left(right, out=out)
            return
        self._has_begun = True
        columns = out[0].split(self._block_rows, dim=1)
        for matrix, residual, column in zip(*self._split(), columns, strict=True):
            torch.mm(right[0], matrix.add_(residual).t(), out=column)

    def right(self, left: Tensor, *, out: Tensor) -> None:
        if not self._has_begun:
            super().begin()
            self._has_begun = True
        super().right(left, out=out)

    def finish(self, own: Approximation, mean: Approximation, is_sound: Tensor | None) -> None:
        if self._residuals is None or is_sound is not None:
            super().finish(own, mean, is_sound)
            return
        parts = (factors[0].t().split(self._block_rows) for factors in (own[0], mean[0]))
        for matrix, residual, own_left, mean_left in zip(*self._split(), *parts, strict=True):
            torch.addmm(matrix, own_left, own[1][0], alpha=-1, out=residual)
            torch.mm(mean_left, mean[1][0], out=matrix)

    def _split(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        assert self._residuals is not None
        return self._gradients[0].split(self._block_rows), self._residuals[0].split(self._block_rows)


class Square(Operand):
    """A whole bucket as one square matrix, its end filled with zeros.

    Args:
        bucket: whose parameters' residuals are kept one by one, since buckets change.
        slots: of its parameters.
        side: rows and columns.
        compute_dtype: what products are computed in.
        residual_dtype: of the residuals; ``None`` for no error feedback.
    """

    def __init__(
        self,
        bucket: Bucket,
        slots: Sequence[Slot],
        *,
        side: int,
        compute_dtype: torch.dtype,
        residual_dtype: torch.dtype | None,
    ) -> None:
        self._bucket = bucket
        self._side = side
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
        buffer = self._bucket.buffer
        flat = torch.zeros(self._side * self._side, dtype=self._compute_dtype, device=buffer.device)
        flat[: buffer.numel()].copy_(buffer)
        if self._residuals is not None:
            add_all(self._parts(flat), self._residuals)
        return flat.view(1, self._side, self._side)

    def finish(self, own: Approximation, mean: Approximation, is_sound: Tensor | None) -> None:
        matrix = self.load()
        if self._residuals is not None:
            matrix.baddbmm_(own[0].mT, own[1], alpha=-1)
            parts = self._parts(matrix.view(-1))
            keep(self._residuals, parts, None if is_sound is None else is_sound.expand(len(parts)))
        output = torch.bmm(mean[0].mT, mean[1], out=matrix).view(-1)[: self._bucket.buffer.numel()]
        if is_sound is not None:
            output = torch.where(is_sound, output, torch.nan)
        self._bucket.buffer.copy_(output)

    def _parts(self, flat: Tensor) -> tuple[Tensor, ...]:
        return self._bucket.with_buffer(flat[: self._bucket.buffer.numel()]).gradients


def keep(residuals: Sequence[Tensor], found: Sequence[Tensor], is_sound: Tensor | None) -> None:
    """Overwrite residuals where the step was sound, without asking on the host whether it was."""
    if residuals[0].dtype == torch.float16:
        # Two gradients that cancel in the mean can leave more than it holds, and infinity would stay for ever.
        limit = torch.finfo(torch.float16).max
        found = [new.clamp_(-limit, limit) for new in found]
    if is_sound is None:
        copy_all(residuals, found)
        return
    for residual, new, sound in zip(residuals, found, is_sound.unbind(), strict=True):
        residual.copy_(torch.where(sound, new, residual))


def make_operands(
    bucket: Bucket,
    plan: Plan,
    slots: Sequence[Slot],
    *,
    is_square: bool,
    compute_dtype: torch.dtype,
    residual_dtype: torch.dtype | None,
) -> list[Operand]:
    """An operand a batch of the plan."""
    if is_square:
        (batch,) = plan.batches
        square = Square(bucket, slots, side=batch.rows, compute_dtype=compute_dtype, residual_dtype=residual_dtype)
        return [square]
    operands: list[Operand] = []
    for batch in plan.batches:
        gradients = [bucket.gradients[place] for place in batch.places]
        first = gradients[0]
        own_slots = [slots[place] for place in batch.places]
        is_large = first.device.type == "cpu" and first.numel() > _BLOCK_NUMEL and len(gradients) == 1
        if is_large and first.dtype == compute_dtype and residual_dtype in (None, compute_dtype):
            operands.append(Blocks(first, own_slots[0], residual_dtype=residual_dtype))
        else:
            operands.append(Stack(gradients, own_slots, compute_dtype=compute_dtype, residual_dtype=residual_dtype))
    return operands
