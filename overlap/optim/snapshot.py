"""What an optimizer holds at one moment, and whether two of them hold the same."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["Snapshot", "difference", "is_own", "snapshot"]

Snapshot = dict[str, Any]


def is_own(attribute: str) -> bool:
    """Whether this attribute of an optimizer is neither its parameters and state nor a hook."""
    return attribute not in ("param_groups", "state", "step") and not attribute.startswith("_optimizer_")


def snapshot(optimizer: Optimizer, parameters: Sequence[Tensor]) -> Snapshot:
    """Everything of ``parameters`` and the optimizer that a step can have changed, copied."""
    return {
        "parameters": [parameter.detach().clone() for parameter in parameters],
        "state": [_copied_values(optimizer.state.get(parameter, {})) for parameter in parameters],
        "groups": [
            _copied_values({key: value for key, value in group.items() if key != "params"})
            for group in optimizer.param_groups
        ],
        "attributes": _copied_values(
            {
                **{key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)},
                **{key: value for key, value in vars(optimizer).items() if is_own(key)},
            }
        ),
    }


def _copied_values(values: Any) -> Any:
    """The tensors, numbers and strings in ``values``, and in what it holds, copied; other objects are left out."""
    if isinstance(values, Tensor):
        return values.detach().clone()
    if isinstance(values, Mapping):
        return {key: _copied_values(value) for key, value in values.items() if not isinstance(key, Tensor)}
    if isinstance(values, (list, tuple)):
        return [_copied_values(value) for value in values]
    return values if isinstance(values, (bool, int, float, complex, str)) else None


def difference(expected: Snapshot, actual: Snapshot) -> str | None:
    """What is not the same, in words; ``None`` where everything is, in every bit."""
    for key, words in (("groups", "{} in a group"), ("attributes", "{} of the optimizer")):
        if (name := _differing(expected[key], actual[key])) is not None:
            return words.format(repr(name))
    for place, (one, other) in enumerate(zip(expected["parameters"], actual["parameters"], strict=True)):
        if not _is_same(one, other):
            return f"parameter {place}"
    if (name := _differing(expected["state"], actual["state"])) is not None:
        return f"{name!r} in the state"
    return None


def _differing(expected: Any, actual: Any) -> Any:
    """The innermost key under which two values differ."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        pairs: Iterator[tuple[Any, Any, Any]] = ((key, expected[key], actual.get(key)) for key in expected)
    elif isinstance(expected, list) and isinstance(actual, list):
        # Lists whose lengths differ have an entry for each parameter.
        pairs = ((place, one, other) for place, (one, other) in enumerate(zip(expected, actual, strict=False)))
    else:
        return None if _is_same(expected, actual) else "value"
    for key, one, other in pairs:
        if (found := _differing(one, other)) is not None:
            return key if found == "value" else found
    return None


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape:
            return True  # State of a part has the shape of the part.
        return torch.equal(one, other) or bool(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    return type(one) is type(other) and one == other
