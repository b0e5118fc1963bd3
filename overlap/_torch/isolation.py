"""Running an optimizer's ``step`` for the sake of an experiment: what it must not reach, and what is put back."""

from __future__ import annotations

import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import optimizer as base
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CollectiveRefusedError", "GeneratorStates", "collectives_refused", "global_step_hooks_suspended"]


class CollectiveRefusedError(Exception):
    """A collective was issued where there must be none."""


class _RefuseCollectives(TorchDispatchMode):
    """Private: every collective of torch.distributed is an operator of one of these namespaces."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise CollectiveRefusedError(str(func))
        return func(*args, **(kwargs or {}))


def collectives_refused() -> Any:
    """Within, a collective is a :class:`CollectiveRefusedError` before anything is sent."""
    return _RefuseCollectives()  # type: ignore[no-untyped-call]


class _GlobalHooks:
    """The hooks of all optimizers. The threads of several models may suspend them at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._suspensions = 0
        self._kept: tuple[Any, Any] = (None, None)

    @property
    def is_suspended(self) -> bool:
        return self._suspensions > 0

    def suspend(self) -> None:
        with self._lock:
            if not self._suspensions:
                self._kept = base._global_optimizer_pre_hooks, base._global_optimizer_post_hooks
                base._global_optimizer_pre_hooks, base._global_optimizer_post_hooks = OrderedDict(), OrderedDict()
            self._suspensions += 1

    def resume(self) -> None:
        with self._lock:
            self._suspensions -= 1
            if not self._suspensions:
                base._global_optimizer_pre_hooks, base._global_optimizer_post_hooks = self._kept


_global_hooks = _GlobalHooks()


@contextmanager
def global_step_hooks_suspended() -> Iterator[None]:
    """Within, ``Optimizer.step`` runs no hooks that were registered for all optimizers. Private: where they are kept.

    A step on a part of the parameters, or on copies, is not a step of the training loop.
    """
    if not (_global_hooks.is_suspended or base._global_optimizer_pre_hooks or base._global_optimizer_post_hooks):
        yield
        return
    _global_hooks.suspend()
    try:
        yield
    finally:
        _global_hooks.resume()


class GeneratorStates:
    """The states of all global random number generators: of torch on the CPU and on ``devices``, Python and NumPy."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._access: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
            "torch": (torch.get_rng_state, torch.set_rng_state),
            "random": (random.getstate, random.setstate),
        }
        for device in {device for device in devices if device.type not in ("cpu", "meta")}:
            self._access[f"torch on {device}"] = _of_device(device)
        if (numpy := sys.modules.get("numpy")) is not None:
            self._access["numpy.random"] = (numpy.random.get_state, numpy.random.set_state)
        self._states = {name: get() for name, (get, _) in self._access.items()}

    def changed(self) -> tuple[str, ...]:
        """The names of those that have been drawn from."""
        return tuple(name for name, (get, _) in self._access.items() if not _is_same(self._states[name], get()))

    def restore(self) -> None:
        """Set all back."""
        for name, (_, set_) in self._access.items():
            set_(self._states[name])


def _of_device(device: torch.device) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    module = torch.get_device_module(device)
    return lambda: module.get_rng_state(device), lambda state: module.set_rng_state(state, device)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return repr(one) == repr(other)
