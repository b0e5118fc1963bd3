"""Nested values of tensors and plain values: mapped, as a skeleton and tensors, and from rank to rank."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap.errors import ConfigurationError
from overlap.ranks.board import failures_explained

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)

# In a skeleton: a whole number, which is in the row of int64.
_NUMBER = torch.device("meta")


def snapshot(value: Any, where: str = "state_dict()") -> Any:
    """A copy of a nested state with its tensors in CPU memory, which ``torch.load(weights_only=True)`` takes; raises as
    :func:`mapped`."""
    return mapped(value, lambda one: one.detach().to("cpu", copy=True) if isinstance(one, Tensor) else one, where)


def mapped(value: Any, function: Callable[[Any], Any], where: str = "state_dict()") -> Any:
    """A nested state with what ``function`` returns in the place of its tensors and plain values.

    Raises:
        ConfigurationError: something in it is neither a tensor nor a plain value; ``where`` names it.
    """
    if isinstance(value, Tensor) or type(value) in _PLAIN:
        return function(value)
    if isinstance(value, Mapping):
        return {key: mapped(one, function, f"{where}[{key!r}]") for key, one in value.items()}
    if isinstance(value, (list, tuple, set)):
        members = [mapped(one, function, f"{where}[{place}]") for place, one in enumerate(value)]
        return members if isinstance(value, list) else tuple(members) if isinstance(value, tuple) else set(members)
    if hasattr(value, "dtype") and hasattr(value, "item"):  # A number of NumPy.
        return mapped(value.item(), function, where)
    raise ConfigurationError(
        f"{where} is a {type(value).__name__}, which is neither a tensor nor a plain value, so "
        "torch.load(weights_only=True) would refuse it: keep it apart, or as numbers and tensors"
    )


def split(value: Any, where: str = "state_dict()") -> tuple[Any, list[Tensor]]:
    """The skeleton of ``value``, and the tensors that are in rows."""
    leaves: list[Tensor] = []

    def leaf(one: Any) -> Any:
        is_number = type(one) is int and -(2**63) <= one < 2**63
        if not is_number and not isinstance(one, Tensor):
            return one
        leaves.append(torch.tensor(one, device="cpu") if is_number else one.detach())
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
        return torch.zeros((), device="cpu")

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


Split = tuple[Any, list[Tensor]]
"""What :func:`split` returns."""


def send(value: Split, to: int, group: dist.ProcessGroup) -> None:
    """Send what was split to rank ``to`` of a Gloo ``group``, a tensor at a time. Raises: CollectiveError: it is
    lost."""
    skeleton, leaves = value
    data = packed(skeleton)
    for tensor in (torch.tensor(data.numel(), device="cpu"), data, *leaves):
        if tensor.numel():
            with failures_explained():
                dist.send(tensor.cpu().contiguous(), group=group, group_dst=to)


def receive(rank: int, group: dist.ProcessGroup) -> Any:
    """What ``rank`` sends."""

    def take(dtype: torch.dtype, shape: Collection[int]) -> Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        if tensor.numel():
            with failures_explained():
                dist.recv(tensor, group=group, group_src=rank)
        return tensor

    return joined(unpacked(take(torch.uint8, (int(take(torch.int64, ()).item()),))), take)
