"""Which kernels encode and decode chunks of numbers: PyTorch's own, or Triton's in their place.

[Note: kernels of our own]

PyTorch's operators read and write a bucket some ten times to encode it. Two Triton kernels do it in one pass each (see
:mod:`overlap.hooks.wires.triton_kernels`), bit for bit alike. They are used for tensors on CUDA devices where Triton is
installed, as it is with PyTorch for CUDA, and nothing of it is imported before. Before they are used on a device for
the first time, they are run on a few chunks beside PyTorch's operators: if they cannot be compiled, or if a bit
differs, there is a warning, and the operators are used. So ranks need not have the same kernels.

A top-k is left to PyTorch, which selects by radix; so is a cast to nearest, which is one operator already. And so is
the error feedback of PowerSGD: what is added to gradients is one operator for all of them, and what is subtracted is
the last term of a matrix product.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import warnings
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from overlap.hooks.wires.row_kernels import RowCodec, RowKernels

__all__ = ["Form", "in_form", "kernels_for"]

Form = Literal["auto", "plain", "triton"]

_form: Form = "auto"


@contextlib.contextmanager
def in_form(form: Form) -> Iterator[None]:
    """Within it chunks are encoded and decoded in this form, on all threads, for comparisons: by PyTorch's operators
    (``"plain"``), or by Triton's kernels, and there is an error where they cannot be used."""
    global _form
    before, _form = _form, form
    try:
        yield
    finally:
        _form = before


def kernels_for(codec: RowCodec, values: Tensor) -> RowKernels | None:
    """Kernels that encode and decode ``values`` by ``codec``; ``None`` where PyTorch's operators do."""
    is_taken = values.dtype == torch.float32 and values.stride(-1) == 1
    if _form == "plain" or not is_taken or not _is_for_triton(values.device):
        return None
    if _form == "auto" and not _are_right(codec.resized(chunks=5, chunk_numel=200), values.device):
        return None
    return _triton_kernels(codec)


def _triton_kernels(codec: RowCodec) -> RowKernels | None:
    from overlap.hooks.wires.triton_kernels import TritonKernels

    return TritonKernels(codec) if TritonKernels.can_encode(codec) else None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _is_for_triton(device: torch.device) -> bool:
    # Triton's interpreter takes tensors of the CPU.
    is_on_its_device = device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")
    return is_on_its_device and _has_triton()


@functools.cache
def _are_right(codec: RowCodec, device: torch.device) -> bool:
    """Whether the kernels of ``codec`` can be compiled for ``device``, and are the operators bit for bit."""
    try:
        differing = _differing(codec, device)
    except Exception as error:
        warnings.warn(f"Triton's kernels for wires are not used on {device}: {error!r}", RuntimeWarning, stacklevel=2)
        return False
    if differing is not None:
        what = f"{differing} is not that of PyTorch's operators"
        warnings.warn(f"Triton's kernels for wires are not used on {device}: {what}", RuntimeWarning, stacklevel=2)
    return differing is None


def _differing(codec: RowCodec, device: torch.device) -> str | None:
    """The first result of Triton's kernels that is not that of PyTorch's operators. The host waits for the device."""
    kernels = _triton_kernels(codec)
    assert kernels is not None, "chunks are short"
    random = torch.Generator(device).manual_seed(0)
    values = torch.randn(3, codec.numel, generator=random, device=device)
    values *= torch.logspace(-42, 37, codec.numel, device=device)
    values[0, :300] = 0
    messages = torch.zeros(2, 3, codec.message_bytes, dtype=torch.uint8, device=device)
    left = torch.stack([values, values])
    total = torch.zeros(2, codec.numel, device=device)
    for generator in (None, random):
        state = random.get_state()
        with in_form("plain"):
            codec.subtract_rows(left[0], messages[0], generator)
            for message in messages[0]:
                codec.add_rows(message[None], total[0])
        random.set_state(state)
        kernels.encode(left[1], messages[1], generator, subtracts=True)
        kernels.add(messages[0], total[1])
        for what, (expected, got) in {"a message": messages, "an error": left, "a sum": total}.items():
            if not torch.equal(expected, got):
                return what
    return None
