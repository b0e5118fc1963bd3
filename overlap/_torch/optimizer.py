"""Private state of torch.optim.Optimizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

__all__ = ["drop_hooks", "mark_stepped", "patch_step", "unhooked_step"]


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
