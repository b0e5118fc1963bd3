"""Nested values of tensors and plain values: mapped, as a skeleton and tensors, and from rank to rank."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._checks import PLAIN_TYPES
from overlap.errors import ConfigurationError
from overlap.ranks.board import failures_explained

# Tensors begin at multiples of this in the bytes of a value, so that each may be viewed in its dtype.
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Leaf:
    """A tensor whose bytes are elsewhere."""

    start: int
    """Where it begins in the bytes of the value that it is in."""
    shape: torch.Size
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.start + self.shape.numel() * self.dtype.itemsize


_PLAIN = (*PLAIN_TYPES, torch.dtype, torch.device, torch.Size, Leaf)


def snapshot(value: Any, where: str = "state_dict()") -> Any:
    """A copy of a nested state with its tensors in CPU memory, which ``torch.load(weights_only=True)`` takes; raises as
    :func:`mapped`."""
    return mapped(value, lambda one: one.detach().to("cpu", copy=True) if isinstance(one, Tensor) else one, where)


def mapped(value: Any, function: Callable[[Any], Any], where: str = "state_dict()") -> Any:
    """A nested state with the results of ``function`` in the place of its tensors and plain values.

    Raises:
        ConfigurationError: something in it is neither a tensor nor a plain value; ``where`` names it.
    """
    if isinstance(value, Tensor) or type(value) in _PLAIN:
        return function(value)
    if isinstance(value, Mapping):
        names = {key: mapped(key, lambda one: one, f"the key {key!r} of {where}") for key in value}
        return {names[key]: mapped(one, function, f"{where}[{key!r}]") for key, one in value.items()}
    if isinstance(value, (list, tuple, set)):
        members = [mapped(one, function, f"{where}[{place}]") for place, one in enumerate(value)]
        return members if isinstance(value, list) else tuple(members) if isinstance(value, tuple) else set(members)
    if hasattr(value, "dtype") and getattr(value, "shape", None) == ():  # A number of NumPy.
        return mapped(value.item(), function, where)
    raise ConfigurationError(
        f"{where} is a {type(value).__name__}, which is neither a tensor nor a plain value, so "
        "torch.load(weights_only=True) would refuse it: keep it apart, or as numbers and tensors"
    )


def split(value: Any, where: str = "state_dict()") -> tuple[Any, list[Tensor]]:
    """The skeleton of ``value``, in which tensors are on the device "meta", and the tensors."""
    leaves: list[Tensor] = []

    def leaf(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        leaves.append(one.detach())
        return torch.empty(one.shape, dtype=one.dtype, device="meta")

    return mapped(value, leaf, where), leaves


def laid_out(skeleton: Any) -> tuple[Any, list[Leaf]]:
    """The value of a ``skeleton`` with a :class:`Leaf` for each tensor, and all of these."""
    leaves: list[Leaf] = []

    def leaf(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        start = -(-(leaves[-1].end if leaves else 0) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        leaves.append(Leaf(start, one.shape, one.dtype))
        return leaves[-1]

    return mapped(skeleton, leaf), leaves


def filled(laid: Any, tensor_of: Callable[[Leaf], Tensor]) -> Any:
    """A value that was laid out, with its tensors."""
    return mapped(laid, lambda one: tensor_of(one) if isinstance(one, Leaf) else one)


def send(value: Any, to: int, group: dist.ProcessGroup) -> None:
    """Send a nested value to rank ``to`` of a Gloo ``group``, a tensor at a time. Raises: CollectiveError: it is
    lost."""
    skeleton, leaves = split(value)
    buffer = io.BytesIO()
    torch.save(skeleton, buffer)
    data = torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)
    for tensor in (torch.tensor(data.numel(), device="cpu"), data, *leaves):
        if tensor.numel():
            with failures_explained():
                dist.send(tensor.cpu().contiguous(), group=group, group_dst=to)


def receive(rank: int, group: dist.ProcessGroup) -> Any:
    def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        if tensor.numel():
            with failures_explained():
                dist.recv(tensor, group=group, group_src=rank)
        return tensor

    data = take((int(take((), torch.int64).item()),), torch.uint8)
    laid, _ = laid_out(torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True))
    return filled(laid, lambda leaf: take(leaf.shape, leaf.dtype))
