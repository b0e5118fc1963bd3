"""Private state of torch.optim.Optimizer: its hooks, and replacements of its ``step``."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as base

_ONLY_WATCHES = "_overlap_only_watches"
_DELEGATORS = ("AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer")


# Wrappers, and replacements of step.


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of Accelerate's and Lightning's wrappers, which decide when to step and change nothing else.

    They are recognized by name: other work of a wrapper in ``step`` cannot be seen.
    """
    while any(cls.__name__ in _DELEGATORS for cls in type(optimizer).__mro__):
        inner = getattr(optimizer, "optimizer", None)
        if not isinstance(inner, Optimizer) or inner is optimizer:
            break
        optimizer = inner
    return optimizer


def all_of(optimizer: Optimizer) -> list[Optimizer]:
    """``optimizer``, and those that it wraps."""
    wrapped = getattr(optimizer, "optimizer", None)
    several = [optimizer, *([wrapped] if isinstance(wrapped, Optimizer) else [])]
    return [*several, *getattr(wrapped, "optimizers", ())]


def is_around(wrapper: Any, optimizer: object) -> bool:
    """Whether ``wrapper`` is ``optimizer``, or wraps it, perhaps several times."""
    while wrapper is not None and wrapper is not optimizer:
        wrapper = getattr(wrapper, "optimizer", None)
    return wrapper is not None


def stepping(parameter: object) -> Optimizer | None:
    """The optimizer in whose ``step`` the calling thread is, if that has ``parameter``."""
    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code.co_name == "step" and frame.f_code.co_argcount:
            optimizer = frame.f_locals.get(frame.f_code.co_varnames[0])
            groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else ()
            if any(one is parameter for group in groups for one in group["params"]):
                return optimizer
    return None


def unhooked_step(cls: type[Optimizer]) -> Callable[[Any], Any]:
    """``cls.step`` without the wrapper that runs step hooks, by the attribute with which torch.optim marks it.

    One step of the training loop may call ``step`` several times, on parts of the parameters, but step hooks run once.
    """
    step: Any = cls.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def init_group(cls: type[Optimizer]) -> Callable[..., Any] | None:
    """``cls._init_group``, without the wrapper with which the first ``torch.compile`` keeps it out of graphs."""
    method: Any = getattr(cls, "_init_group", None)
    while (inner := getattr(method, "_torchdynamo_orig_callable", None)) is not None:
        method = inner
    return method  # type: ignore[no-any-return]


def own_step(optimizer: Optimizer) -> Callable[..., Any] | None:
    """The ``step`` that was set on the object in place of its class's, if no LR scheduler set it.

    LR schedulers mark the method that they replace by an attribute, to see whether it is called.
    """
    step: Any = vars(optimizer).get("step")
    inner = step
    while inner is not None:
        if isinstance(inner, MethodType) and inner.__self__ is optimizer:
            inner = inner.__func__  # Whoever replaces it for a while often sets the bound method back.
        elif getattr(inner, "_wrapped_by_lr_sched", False) and hasattr(inner, "__wrapped__"):
            inner = inner.__wrapped__
        else:
            break
    return None if inner is None or inner is getattr(type(optimizer), "step", None) else step


def checks_devices(optimizer: Optimizer) -> bool:
    """Whether the next ``step`` will look whether the fused kernel can run where the parameters are."""
    return bool(vars(optimizer).get("_need_device_dtype_check_for_fused"))


def is_scheduled(optimizer: Optimizer) -> bool:
    """Whether an LR scheduler was made for ``optimizer``, or for the one that it wraps; as in :func:`own_step`."""
    return any(getattr(vars(one).get("step"), "_wrapped_by_lr_sched", False) for one in all_of(optimizer))


def without_init(optimizer: Optimizer) -> None:
    """Give an optimizer that did not run ``Optimizer.__init__`` the attributes of ``Optimizer``, without groups."""
    Optimizer.__setstate__(optimizer, {"defaults": {}})


def patch_step(optimizer: Optimizer) -> None:
    """Make an optimizer that did not run ``Optimizer.__init__`` run its step hooks."""
    optimizer._patch_step_function()


def mark_stepped(optimizer: Optimizer) -> None:
    """Let LR schedulers of ``optimizer``, or of the one that it wraps, see that it was stepped; otherwise they warn."""
    getattr(optimizer, "optimizer", optimizer)._opt_called = True  # type: ignore[union-attr]


# Step hooks.

hook_attributes = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""Where ``Optimizer`` keeps hooks, which no ``step`` changes."""

no_step_hooks: Mapping[str, Any] = {key: OrderedDict() for key in hook_attributes[:2]}
"""The attributes of an optimizer without step hooks, whose ``step`` calls its parent's wrapped one."""


def runs_step_hooks(optimizer: Optimizer) -> bool:
    """Whether ``step`` runs hooks; wrappers that do not call ``Optimizer.__init__`` need not."""
    return all(hasattr(optimizer, attribute) for attribute in hook_attributes[:2])


def pre_hooks(optimizer: Optimizer) -> dict[int, Any]:
    """The step pre-hooks of ``optimizer`` itself; to be changed in place. Wrappers may have none at all."""
    return getattr(optimizer, "_optimizer_step_pre_hooks", {})


def step_hooks(optimizer: Optimizer) -> tuple[list[Any], list[Any]]:
    """The hooks before and after a ``step`` of ``optimizer``, its own and those of all optimizers, in the order of
    torch.optim's wrapper."""
    before, after = getattr(optimizer, hook_attributes[0], {}), getattr(optimizer, hook_attributes[1], {})
    return (
        [*base._global_optimizer_pre_hooks.values(), *before.values()],
        [*after.values(), *base._global_optimizer_post_hooks.values()],
    )


def has_post_hooks(optimizer: Optimizer) -> bool:
    """Whether anything runs after a ``step`` of ``optimizer`` that may read parameters."""
    return not all(getattr(hook, _ONLY_WATCHES, False) for hook in step_hooks(optimizer)[1])


def only_watches(hook: Callable[..., None]) -> Callable[..., None]:
    """Mark a step hook that reads no parameters: nothing need be waited for before it runs."""
    setattr(hook, _ONLY_WATCHES, True)
    return hook


def watch_steps(optimizer: Optimizer, hook: Callable[..., Any]) -> Callable[[], None]:
    """Register a step pre-hook that runs before those that are there; returns a function that removes it."""
    handle = optimizer.register_step_pre_hook(hook)
    optimizer._optimizer_step_pre_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle.remove


def drop_hooks(optimizer: Optimizer) -> None:
    for attribute in hook_attributes[:2]:
        setattr(optimizer, attribute, OrderedDict())


def step_without_hooks(optimizer: Optimizer, *args: Any) -> Any:
    """``optimizer.step(*args)``, the object's own where one was set, by a proxy that has run its step hooks already."""
    if own_step(optimizer) is None and getattr(type(optimizer).step, "hooked", False):
        return unhooked_step(type(optimizer))(optimizer, *args)
    hooks: list[Any] = [getattr(optimizer, attribute, {}) for attribute in hook_attributes[:2]]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        with global_step_hooks_suspended():
            return optimizer.step(*args)
    finally:
        for each, before in zip(hooks, kept, strict=True):
            each.update(before)


# The hooks of all optimizers, while they are suspended. The threads of several models may do so at the same time.
_suspending = threading.Lock()
_suspensions = 0
_suspended: tuple[Any, Any] = (None, None)


@contextmanager
def global_step_hooks_suspended() -> Iterator[None]:
    """Within it ``Optimizer.step`` runs no hooks that were registered for all optimizers: a step on a part of the
    parameters is not a step of the training loop."""
    global _suspensions, _suspended
    if not (_suspensions or base._global_optimizer_pre_hooks or base._global_optimizer_post_hooks):
        yield
        return
    with _suspending:
        if not _suspensions:
            _suspended = base._global_optimizer_pre_hooks, base._global_optimizer_post_hooks
            base._global_optimizer_pre_hooks, base._global_optimizer_post_hooks = OrderedDict(), OrderedDict()
        _suspensions += 1
    try:
        yield
    finally:
        with _suspending:
            _suspensions -= 1
            if not _suspensions:
                base._global_optimizer_pre_hooks, base._global_optimizer_post_hooks = _suspended


def run_state_hooks(optimizer: Optimizer, when: str, state_dict: dict[str, Any] | None = None) -> Any:
    """Run the hooks of ``optimizer.register_{when}_hook``, which a class with a ``state_dict()`` of its own has no
    other way to run; returns ``state_dict``, in place of which each may give another."""
    for hook in getattr(optimizer, f"_optimizer_{when}_hooks").values():
        replaced = hook(optimizer) if state_dict is None else hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    return state_dict
