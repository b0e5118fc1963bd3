"""Kernels over lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["add_", "copy_", "norms", "scale_"]


def norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    """The ``order``-norm of each tensor, as ``torch.nn.utils.clip_grad_norm_`` takes it.

    Private: one kernel for all, where ``torch.linalg.vector_norm`` is one a tensor.
    """
    return list(torch._foreach_norm(list(tensors), order))


def scale_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by the 0-dimensional ``factor``, in place. Private: as :func:`norms`."""
    torch._foreach_mul_(list(tensors), factor)


def add_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Add to each tensor its other one, in place, whatever their dtypes. Private: as :func:`norms`."""
    torch._foreach_add_(list(tensors), list(others))


def copy_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Overwrite each tensor with its other one, whatever their dtypes. Private: as :func:`norms`."""
    torch._foreach_copy_(list(tensors), list(others))
