"""An optimizer that stands for another one, and the guard that lets only the library step the wrapped one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from overlap._torch.optimizer import patch_step, pre_hooks, runs_step_hooks
from overlap.errors import RegistrationError, TrainingLoopError
from overlap.hooks import StageContext

__all__ = [
    "OptimizerProxy",
    "StepGuard",
    "check_one_model",
    "guarded_by",
    "guards_lifted",
    "refused_pre_hooks",
]


class OptimizerProxy(Optimizer):
    """Shares everything with the optimizer that it wraps: groups, state, defaults and step hooks, at all times.

    A subclass has a ``step`` of its own; its step hooks, which are the wrapped optimizer's, run around that.
    """

    # GradScaler then leaves gradients as they are, always calls step, and says there whether they are finite.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        """The wrapped optimizer."""
        patch_step(self)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # Not set yet: a copy or an unpickled object in the making.
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state, by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As the wrapped optimizer's."""
        self.optimizer.load_state_dict(dict(state_dict))


class StepGuard:
    """A pre-hook of an optimizer that raises if anyone but the library steps it, for as long as the model lives.

    Args:
        stage: what makes the update.
        instead: how the optimizer is stepped, and what to call in place of ``step()``.
        through: by whose ``step`` it may be stepped all the same.
    """

    def __init__(self, stage: Any, instead: str, *, through: OptimizerProxy | None) -> None:
        self._stage = weakref.ref(stage)
        self._instead = instead
        self._through = None if through is None else weakref.ref(through)

    @property
    def stage(self) -> Any:
        """The stage, if it and its model are alive; ``None`` else."""
        stage = self._stage()
        if stage is None or stage.context is None or (stage.context.ddp is not None and stage.context.ddp() is None):
            return None
        return stage

    def is_alive(self) -> bool:
        """Whether the stage still updates a model; lets go of the optimizer if not."""
        if self.stage is not None:
            gc.collect()  # A model that was dropped is often part of a cycle.
        if self.stage is not None:
            return True
        if (stage := self._stage()) is not None and stage.context is not None:
            stage.detach()
        return False

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._comes_through(optimizer) or _changes_nothing(optimizer) or not self.is_alive():
            return
        raise TrainingLoopError(f"this {type(optimizer).__name__} is stepped {self._instead}")

    def _comes_through(self, optimizer: Optimizer) -> bool:
        """Whether this is the step of a proxy, which shares its hooks, and that goes on to the one it may come by."""
        while isinstance(optimizer, OptimizerProxy) and self._through is not None:
            if optimizer is self._through():
                return True
            optimizer = optimizer.optimizer
        return False


def guarded_by(guard: StepGuard, optimizer: Optimizer) -> RemovableHandle | None:
    """Let ``guard`` watch ``optimizer``, if that runs step hooks; some wrappers do not."""
    if not runs_step_hooks(optimizer):
        return None
    return optimizer.register_step_pre_hook(guard)


def check_one_model(optimizer: Optimizer, context: StageContext) -> None:
    """Raises: RegistrationError: a stage updates some of the same parameters for another DDP model."""
    names = context.names or {}
    for guard in [hook for hook in pre_hooks(optimizer).values() if isinstance(hook, StepGuard)]:
        other = guard.stage
        if other is None or other.context is None or other.context.ddp is context.ddp:
            continue
        shared = [parameter for parameter in other.context.names or {} if parameter in names]
        if shared and guard.is_alive():
            raise RegistrationError(
                f"{names[shared[0]]} (and {len(shared) - 1} other parameters) are updated by {other!r} already, of "
                "another DistributedDataParallel of the same module: first call .remove() on what register returned "
                "for that"
            )


@contextmanager
def guards_lifted(optimizer: Optimizer) -> Iterator[None]:
    """Within, ``optimizer.step()`` is the library's own call."""
    hooks = pre_hooks(optimizer)
    guards = {key: hook for key, hook in hooks.items() if isinstance(hook, StepGuard)}
    for key in guards:
        del hooks[key]
    try:
        yield
    finally:
        hooks.update(guards)


def refused_pre_hooks(optimizer: Optimizer, global_hooks: list[Any]) -> list[str]:
    """The pre-hooks of ``optimizer`` that must run before its update, by name; those of this library only watch."""
    return [
        getattr(hook, "__qualname__", repr(hook))
        for hook in (*pre_hooks(optimizer).values(), *global_hooks)
        if not (isinstance(hook, StepGuard) or str(getattr(hook, "__module__", "")).startswith("overlap."))
    ]


def _changes_nothing(optimizer: Optimizer) -> bool:
    """Whether this is the step by which ``torch.distributed.checkpoint`` makes the state: zero rates and gradients."""
    groups = optimizer.param_groups
    parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
    return all("lr" in group and not bool(group["lr"]) for group in groups) and not any(
        parameter.grad is not None and bool(parameter.grad.any()) for parameter in parameters
    )
