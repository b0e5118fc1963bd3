"""Private state of torch.optim.Optimizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

__all__ = [
    "after_load_state_dict",
    "after_state_dict",
    "before_load_state_dict",
    "before_state_dict",
    "drop_hooks",
    "mark_stepped",
    "patch_step",
    "unhooked_step",
]


def unhooked_step(cls: type[Optimizer]) -> Callable[[Any], Any]:
    """``cls.step`` without the wrapper that runs step hooks.

    One step of the training loop may call ``step`` several times, on parts of the parameters, but step hooks must run
    once. Private: the attribute by which torch.optim marks its wrapper.
    """
    step: Any = cls.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def patch_step(optimizer: Optimizer) -> None:
    """Make an optimizer that did not run ``Optimizer.__init__`` run its step hooks."""
    optimizer._patch_step_function()


def mark_stepped(optimizer: Optimizer) -> None:
    """Tell LR schedulers that the optimizer was stepped; otherwise they warn. Private: there is no public way."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def drop_hooks(twin: Optimizer) -> None:
    """Remove the step hooks of ``twin``, whose ``step`` calls its parent's wrapped one."""
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()


def before_state_dict(optimizer: Optimizer) -> None:
    """Run the hooks of ``register_state_dict_pre_hook``. Private, as the next three: the hooks' registries."""
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
