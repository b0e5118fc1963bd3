"""Nested values, as a skeleton and tensors."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from overlap.resume.state import mapped

__all__ = ["joined", "packed", "sizes_of", "split", "unpacked"]

# In a skeleton: a whole number, which is in the row of int64.
_NUMBER = torch.device("meta")


def split(value: Any, where: str = "state_dict()") -> tuple[Any, list[Tensor]]:
    """The skeleton of ``value``, and the tensors that are in rows."""
    leaves: list[Tensor] = []

    def leaf(one: Any) -> Any:
        is_number = type(one) is int and -(2**63) <= one < 2**63
        if not is_number and not isinstance(one, Tensor):
            return one
        leaves.append(torch.tensor(one) if is_number else one.detach())
        return _NUMBER if is_number else torch.empty(one.shape, dtype=one.dtype, device="meta")

    return mapped(value, leaf, where), leaves


def joined(skeleton: Any, take: Callable[[torch.dtype, torch.Size], Tensor]) -> Any:
    """The values of a ``skeleton``, of which ``take`` returns one tensor after the other."""

    def leaf(one: Any) -> Any:
        if isinstance(one, Tensor):
            return take(one.dtype, one.shape)
        return int(take(torch.int64, torch.Size()).item()) if one == _NUMBER else one

    return mapped(skeleton, leaf)


def sizes_of(skeleton: Any) -> Counter[torch.dtype]:
    """How many elements it has in the rows of each dtype."""
    sizes: Counter[torch.dtype] = Counter()

    def take(dtype: torch.dtype, shape: torch.Size) -> Tensor:
        sizes[dtype] += shape.numel()
        return torch.zeros(())

    joined(skeleton, take)
    return sizes


def packed(skeleton: Any) -> Tensor:
    """A skeleton as bytes, after their number, so that others may follow."""
    buffer = io.BytesIO()
    torch.save(skeleton, buffer)
    data = buffer.getvalue()
    return torch.frombuffer(bytearray(len(data).to_bytes(8) + data), dtype=torch.uint8)


def unpacked(data: Tensor) -> Any:
    """What :func:`packed` was given; of zeros an empty state."""
    found = data.numpy().tobytes()
    length = int.from_bytes(found[:8])
    return torch.load(io.BytesIO(found[8 : 8 + length]), weights_only=True) if length else {}
