"""Memory that tensors share, and who still refers to it."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["holders", "is_referred_to", "storage_key", "tensors_on"]


def storage_key(tensor: Tensor) -> int:
    """What tells the memory of ``tensor`` from all other memory that is there. Private: the address of its owner."""
    return int(tensor.untyped_storage()._cdata)


def tensors_on(storage: torch.UntypedStorage) -> int:
    """How many tensors, in Python, C++ or saved for a backward, use ``storage``; a Python reference to itself counts.

    Private: there is no public way to ask (CUDA graph trees do the same).
    """
    return int(torch._C._storage_Use_Count(storage._cdata))


def is_referred_to(parameter: Tensor) -> bool:
    """Whether the tensor in ``parameter.grad``, which C++ holds, too, is referred to by anything else in Python."""
    gradient = parameter.grad
    return gradient is not None and sys.getrefcount(gradient) > _of_a_gradient()


def holders(parameter: Tensor) -> int:
    """How often C++ holds the tensor in ``parameter.grad`` beside that: DDP, or another tensor whose ``.grad`` it is.

    Private: as :func:`tensors_on`.
    """
    gradient = parameter.grad
    return 0 if gradient is None else _use_count(gradient) - _holders_of_a_gradient()


def _use_count(tensor: Any) -> int:
    return int(tensor._use_count())


@cache
def _holders_of_a_gradient() -> int:
    parameter = torch.zeros(1, device="cpu", requires_grad=True)
    parameter.grad = torch.zeros(1, device="cpu")
    gradient = parameter.grad
    return _use_count(gradient)


@cache
def _of_a_gradient() -> int:
    """The count where nothing else refers to it; how references from C++ count differs by version."""
    parameter = torch.zeros(1, device="cpu", requires_grad=True)
    parameter.grad = torch.zeros(1, device="cpu")
    gradient = parameter.grad
    return sys.getrefcount(gradient)
