"""Kernels over lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["add_all", "copy_all", "norms", "scale_", "subtract_from_"]


def norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    """The ``order``-norm of each tensor, as ``torch.nn.utils.clip_grad_norm_`` takes it.

    Private: one kernel for all tensors, where ``torch.linalg.vector_norm`` needs one for each.
    """
    return list(torch._foreach_norm(list(tensors), order))


def scale_(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply each tensor by ``factor`` (0-dimensional), as ``Tensor.mul_`` does, in place. Private: as
    :func:`norms`."""
    if not tensors:
        return
    if isinstance(factor, Tensor) or tensors[0].device.type != "cpu":
        torch._foreach_mul_(list(tensors), factor)
        return
    # On a CPU the call for many rounds the number to a dtype of half precision first.
    for tensor in tensors:
        tensor.mul_(factor)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target. Private: as :func:`norms`."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def add_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Add each source to its target, in place, whatever their dtypes. Private: as :func:`norms`."""
    if targets:
        torch._foreach_add_(list(targets), list(sources))


def subtract_from_(targets: Sequence[Tensor], minuends: Sequence[Tensor]) -> None:
    """Replace each target by its minuend minus the target, in place. Private: as :func:`norms`."""
    if targets:
        torch._foreach_neg_(list(targets))
        torch._foreach_add_(list(targets), list(minuends))
