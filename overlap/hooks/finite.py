"""Whether gradients are finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from overlap._torch.foreach import norms

__all__ = ["LargestElements", "all_finite"]


def all_finite(tensor: Tensor) -> Tensor:
    """``tensor.isfinite().all()``, without the three copies of the tensor's shape that this takes; 0-dimensional."""
    if tensor.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    smallest, largest = torch.aminmax(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    return smallest.isfinite() & largest.isfinite()


class LargestElements:
    """The largest element of each gradient of a pass, taken as they come: not finite where the gradient is not."""

    def __init__(self) -> None:
        self._largest: list[Tensor] = []

    def clear(self) -> None:
        """A new pass begins."""
        self._largest.clear()

    def look(self, gradients: Sequence[Tensor]) -> None:
        """Take note of ``gradients``."""
        present = [gradient for gradient in gradients if gradient.numel()]
        if present:
            # What float64 holds may be infinite as float32.
            each = norms(present, float("inf"))
            self._largest.extend(norm if norm.dtype == torch.float64 else norm.float() for norm in each)

    def found_inf(self, device: torch.device) -> Tensor:
        """1.0 if a gradient that was noted has an element that is not finite, else 0.0; 0-dimensional."""
        if not self._largest:
            return torch.zeros((), device=device)
        return (~torch.isfinite(torch.stack(self._largest))).any().float()
