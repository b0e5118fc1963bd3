"""Kernels over lists of tensors. Private: one call for all of them, where the public functions need one for each."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# Elements of each tensor.
_SAMPLED = 16


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
    """Copy each source into its target."""
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


@torch.no_grad()
def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Of the first values of each of ``tensors``, to compare between ranks; the host waits for their device, once."""
    samples = [tensor.detach().flatten()[:_SAMPLED] for tensor in tensors]
    real = [torch.view_as_real(sample).flatten() if sample.is_complex() else sample for sample in samples]
    if not real:
        return ""
    values = torch.cat([sample.to(real[0].device, torch.float32) for sample in real]).cpu()
    return f"{zlib.crc32(values.numpy().tobytes()):08x}"
