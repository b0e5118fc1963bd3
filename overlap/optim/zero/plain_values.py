"""Values in the form in which they are saved and compared."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_plain", "cloned", "fingerprint"]

# What a fingerprint spells out; of larger tensors it has a digest.
_SPELLED_NUMEL = 4


def as_plain(value: Any) -> Any:
    """``value`` with NumPy's numbers as Python's, which ``torch.load(weights_only=True)`` accepts."""
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(as_plain(item) for item in value)
    is_number_of_numpy = type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0
    return value.item() if is_number_of_numpy else value


def cloned(value: Any, *, device: torch.device | None = None) -> Any:
    """A copy of ``value`` that shares no tensor with it. Pickling a view would save all of its memory."""
    if isinstance(value, Tensor):
        return value.detach().to(device or value.device, copy=True)
    if isinstance(value, dict):
        return {key: cloned(item, device=device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(cloned(item, device=device) for item in value)
    return copy.deepcopy(value)


def fingerprint(value: Any) -> str:
    """A short text that is the same for equal values, of any rank."""
    if isinstance(value, Tensor):
        if value.numel() <= _SPELLED_NUMEL:
            return f"{value.tolist()} ({value.dtype})"
        memory = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return f"{tuple(value.shape)} ({value.dtype}, digest {hashlib.sha256(memory).hexdigest()[:12]})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {fingerprint(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(fingerprint, value))})"
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return repr(value)
    return type(value).__name__
