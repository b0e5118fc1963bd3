"""Copies of states that hold tensors and plain values only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from overlap.errors import ConfigurationError

__all__ = ["snapshot"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def snapshot(value: Any, where: str) -> Any:
    """A copy of a nested state with its tensors in CPU memory, which ``torch.load(weights_only=True)`` takes.

    Raises:
        ConfigurationError: something in it is neither a tensor nor a plain value; ``where`` names it.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        copied = {key: snapshot(one, f"{where}[{key!r}]") for key, one in value.items()}
        if not hasattr(value, "_metadata"):
            return copied
        of_module: Any = OrderedDict(copied)
        of_module._metadata = value._metadata
        return of_module
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple, set)):
        members = [snapshot(one, f"{where}[{place}]") for place, one in enumerate(value)]
        return members if isinstance(value, list) else tuple(members) if isinstance(value, tuple) else set(members)
    if hasattr(value, "dtype") and hasattr(value, "item"):  # A number of NumPy.
        return snapshot(value.item(), where)
    raise ConfigurationError(
        f"{where} is a {type(value).__name__}, which is neither a tensor nor a plain value, so "
        "torch.load(weights_only=True) would refuse it: keep it apart, or as numbers and tensors"
    )
