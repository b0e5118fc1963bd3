"""Private state of torch.optim.Optimizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

__all__ = ["bare_copy", "drop_hooks", "mark_stepped", "own_step", "patch_step", "unhooked_step"]


def unhooked_step(cls: type[Optimizer]) -> Callable[[Any], Any]:
    """``cls.step`` without the wrapper that runs step hooks.

    One step of the training loop may call ``step`` several times, on parts of the parameters, but step hooks must run
    once. Private: the attribute by which torch.optim marks its wrapper.
    """
    step: Any = cls.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def own_step(optimizer: Optimizer) -> Callable[..., Any] | None:
    """The ``step`` that was set on the object in place of its class's, if that is not what an LR scheduler sets.

    Private: the attribute by which LR schedulers mark the method that they replace, to see whether it is called.
    """
    step: Any = vars(optimizer).get("step")
    if step is None:
        return None
    inner = step
    while getattr(inner, "_wrapped_by_lr_sched", False) and hasattr(inner, "__wrapped__"):
        inner = inner.__wrapped__
    return None if inner is getattr(type(optimizer), "step", None) else step


def bare_copy(optimizer: Optimizer) -> Optimizer:
    """An object of the same class without attributes but those of ``Optimizer`` itself, and without hooks."""
    cls = type(optimizer)
    copied = cls.__new__(cls)
    Optimizer.__setstate__(copied, {"defaults": {}})
    return copied


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
