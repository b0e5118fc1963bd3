"""State in the form of ``Optimizer.state_dict``: its values, and parameters in another order."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap.errors import ConfigurationError

__all__ = ["Order", "as_plain", "cloned", "fingerprint", "load_packed", "tensors_in"]

# A fingerprint spells out tensors of up to so many elements; of larger ones it has a digest.
_SPELLED_NUMEL = 4

Order = Sequence[Sequence[int]]
"""Of each group, the place of each of its parameters in the group that was saved."""


def load_packed(optimizer: Optimizer, packed: Mapping[str, Any], order: Order) -> None:
    """Load a ``state_dict()`` of an optimizer whose groups had their parameters in another order.

    ``Optimizer.load_state_dict`` casts all state to the parameter's dtype; here it keeps the one that it was saved in.
    """
    if not {"state", "param_groups"} <= set(packed):
        # A form of the optimizer's own.
        if any(list(places) != sorted(places) for places in order):
            raise ConfigurationError(
                "the optimizer has its parameters in another order than in the run that was saved, and its "
                "state_dict() is in a form of its own: pass the parameters in the same order"
            )
        optimizer.load_state_dict(dict(packed))
        return
    groups = [_reordered(group, places) for group, places in zip(packed["param_groups"], order, strict=True)]
    optimizer.load_state_dict({**packed, "param_groups": groups})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in groups for key in group["params"]]
    for key, parameter in zip(keys, parameters, strict=True):
        for name, value in packed["state"].get(key, {}).items():
            loaded = optimizer.state[parameter].get(name)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(loaded.device, copy=True)


def _reordered(group: Mapping[str, Any], places: Sequence[int]) -> dict[str, Any]:
    members = {key: [group[key][place] for place in places] for key in ("params", "param_names") if key in group}
    return {**group, **members}


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
        items = ", ".join(map(fingerprint, value))
        return f"[{items}]" if isinstance(value, list) else f"({items})"
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return repr(value)
    return type(value).__name__
