"""Kernels over lists of tensors. Private: one call for all of them, where the public functions need one for each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from overlap._torch.device import has_streams

fused_adam_ = torch._fused_adam_
fused_adamw_ = torch._fused_adamw_
fused_sgd_ = torch._fused_sgd_

_ONE = torch.tensor(1.0, device="cpu")


def norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    """The ``order``-norm of each tensor, as ``torch.nn.utils.clip_grad_norm_`` takes it."""
    return list(torch._foreach_norm(list(tensors), order))


def scale_(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply each tensor by ``factor`` (0-dimensional), as ``Tensor.mul_`` does, in place."""
    if not tensors:
        return
    if isinstance(factor, Tensor) or tensors[0].device.type != "cpu":
        torch._foreach_mul_(list(tensors), factor)
        return
    # On a CPU the call for many rounds the number to a dtype of half precision first.
    for tensor in tensors:
        tensor.mul_(factor)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def add_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Add each source to its target, in place, whatever their dtypes."""
    if targets:
        torch._foreach_add_(list(targets), list(sources))


def subtract_from_(targets: Sequence[Tensor], minuends: Sequence[Tensor]) -> None:
    """Replace each target by its minuend minus the target, in place."""
    if targets:
        torch._foreach_neg_(list(targets))
        torch._foreach_add_(list(targets), list(minuends))


def add_one_(steps: list[Tensor]) -> None:
    """Add one to each step count (0-dimensional, all on one device), in place."""
    if steps[0].is_cpu:
        torch._foreach_add_(steps, _ONE, alpha=1.0)  # As torch.optim does: a number would become a tensor for each.
    else:
        torch._foreach_add_(steps, 1)


def subtract_(tensors: list[Tensor], subtrahend: Tensor) -> None:
    torch._foreach_sub_(tensors, [subtrahend] * len(tensors))


def all_finite(tensor: Tensor) -> Tensor:
    """``tensor.isfinite().all()``, without the three copies of the tensor's shape that this takes; 0-dimensional."""
    return largest(tensor) < math.inf  # False for NaN, too.


def largest(tensor: Tensor) -> Tensor:
    """The largest magnitude of the elements, 0-dimensional: not finite where one of them is not."""
    if tensor.numel() == 0:
        return tensor.new_zeros((), dtype=torch.float32)
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if has_streams(real.device):
        norm: Tensor = torch.linalg.vector_norm(real, math.inf)
        return norm
    low, high = torch.aminmax(real)  # On a CPU the norm takes ten times as long.
    return torch.maximum(low.neg(), high)


def sum_of_bits(flat: Tensor) -> Tensor:
    """A 0-dimensional number of 63 bits that tensors with the same bits have in common, and others hardly ever."""
    words = max(1, 8 // flat.element_size())
    if int(flat.storage_offset()) % words:
        flat = flat.clone()
    end = flat.numel() // words * words
    rest = flat[end:].view(torch.uint8).sum()
    return (flat[:end].view(torch.int64).sum() + rest) >> 1


class LargestElements:
    """The largest element of each gradient of a pass, taken as they come: not finite where the gradient is not."""

    def __init__(self) -> None:
        self._largest: list[Tensor] = []

    def clear(self) -> None:
        self._largest.clear()

    def update(self, gradients: Sequence[Tensor]) -> None:
        present = [gradient for gradient in gradients if gradient.numel()]
        if present:
            # A number of float64 may be infinite as float32.
            each = norms(present, float("inf"))
            self._largest.extend(norm if norm.dtype == torch.float64 else norm.float() for norm in each)

    def found_inf(self, device: torch.device) -> Tensor:
        """1.0 if a gradient that was noted has an element that is not finite, else 0.0; 0-dimensional."""
        if not self._largest:
            return torch.zeros((), device=device)
        return (~torch.isfinite(torch.stack(self._largest))).any().float()
