"""State in the form of ``Optimizer.state_dict``: parameters in another order, and dtypes as they were saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from overlap.errors import ConfigurationError

__all__ = ["Order", "load_packed"]

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
