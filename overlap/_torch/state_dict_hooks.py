"""The hooks that users register for an optimizer's ``state_dict()`` and ``load_state_dict()``.

Private: their registries. A class with a ``state_dict()`` of its own has no other way to run them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

__all__ = [
    "after_load_state_dict",
    "after_state_dict",
    "before_load_state_dict",
    "before_state_dict",
]


def before_state_dict(optimizer: Optimizer) -> None:
    """Run the hooks of ``register_state_dict_pre_hook``."""
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)


def after_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Run the hooks of ``register_state_dict_post_hook``, each of which may replace the dict."""
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    return state_dict


def before_load_state_dict(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Run the hooks of ``register_load_state_dict_pre_hook`` on a shallow copy, which each may replace."""
    copied = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        replaced = hook(optimizer, copied)
        copied = copied if replaced is None else replaced
    return copied


def after_load_state_dict(optimizer: Optimizer) -> None:
    """Run the hooks of ``register_load_state_dict_post_hook``."""
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)
