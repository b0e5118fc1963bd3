"""Values of states in the form of ``Optimizer.state_dict``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_plain", "cloned", "tensors_in"]


def tensors_in(value: object) -> list[Tensor]:
    """The tensors in dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def as_plain(value: Any) -> Any:
    """``value`` with NumPy's numbers as Python's, which ``torch.load(weights_only=True)`` accepts."""

    def plain(leaf: Any) -> Any:
        is_number_of_numpy = type(leaf).__module__ == "numpy" and getattr(leaf, "ndim", None) == 0
        return leaf.item() if is_number_of_numpy else leaf

    return _mapped(value, plain)


def cloned(value: Any, *, device: torch.device | None = None) -> Any:
    """A copy of ``value`` that shares no tensor with it. Pickling a view would save all of its memory."""

    def clone(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().to(device or leaf.device, copy=True)
        return copy.deepcopy(leaf)

    return _mapped(value, clone)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(item, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, function) for item in value)
    return function(value)
