"""Whether two states hold the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["is_same_state"]


def is_same_state(one: Any, other: Any) -> bool:
    """Whether nested tensors and plain values are the same, tensors bit for bit.

    >>> is_same_state({"mean": torch.tensor([float("nan")])}, {"mean": torch.tensor([float("nan")])})
    True
    >>> is_same_state({"mean": torch.tensor([0.0])}, {"mean": torch.tensor([-0.0])})
    False
    """
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(_bits_of(one), _bits_of(other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_same_state(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(is_same_state, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _bits_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
