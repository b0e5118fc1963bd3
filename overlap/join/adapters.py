"""How a Join watches and replays each kind of joinable."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.distributed.algorithms import join as base
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from overlap._torch.join import on_notify
from overlap._torch.optimizer import runs_step_hooks, watch_steps
from overlap.errors import ConfigurationError, TrainingLoopError
from overlap.join.session import JoinableAdapter, JoinSession

__all__ = ["JoinHookAdapter", "OptimizerAdapter", "SchedulerAdapter", "once_after"]


class JoinHookAdapter(JoinableAdapter):
    """Any joinable, by its own hook: each notification on active ranks is one ``main_hook`` on those that joined."""

    precedence = 1

    def __init__(self, joinable: base.Joinable, hook: base.JoinHook) -> None:
        if not hasattr(joinable, "_join_config"):
            raise ConfigurationError(f"{type(joinable).__name__}.__init__ does not call Joinable.__init__")
        self._joinable, self._hook = joinable, hook
        self.is_optimizer = isinstance(joinable, Optimizer)

    def enter(self, session: JoinSession, undo: ExitStack) -> None:
        joinable = self._joinable
        if not isinstance(joinable, Optimizer):
            undo.callback(on_notify(joinable, lambda: session.on_event(self, begins_iteration=True)))
            return

        def before_step() -> None:
            session.on_step(self, joinable, begins_iteration=True)

        undo.callback(on_notify(joinable, before_step))

    def replay(self, detail: Any) -> None:
        self._hook.main_hook()

    def post(self, *, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)


class OptimizerAdapter(JoinableAdapter):
    """A plain optimizer: steps on joined ranks as on active ones, with the gradients that DDP's replay leaves."""

    is_optimizer = True

    def __init__(self, optimizer: Optimizer) -> None:
        if not runs_step_hooks(optimizer):
            raise ConfigurationError(
                f"{type(optimizer).__name__} runs no step hooks, so a Join would not see its step(); give Join the "
                "optimizer that it wraps"
            )
        self._optimizer = optimizer

    def enter(self, session: JoinSession, undo: ExitStack) -> None:
        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            if closure is None:
                session.on_step(self, optimizer, begins_iteration=False)
                return None
            # What the closure does comes before the step.
            told = once_after(closure, lambda: session.on_step(self, optimizer, begins_iteration=False))
            others = {name: value for name, value in kwargs.items() if name != "closure"}
            return (args[0], told, *args[2:]), others

        undo.callback(watch_steps(self._optimizer, before_step))

    def replay(self, detail: Any) -> None:
        self._optimizer.step()


def once_after(closure: Callable[[], Any], then: Callable[[], None]) -> Callable[[], Any]:
    """``closure``, and ``then`` when it is done, which ranks without inputs are told of: so it may be called once."""
    calls = 0

    def call() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise TrainingLoopError(
                "the optimizer calls its closure again within one step, and ranks that have run out of inputs cannot "
                "follow that: use an optimizer that evaluates the model once a step, or leave Join out"
            )
        result = closure()
        then()
        return result

    return call


class SchedulerAdapter(JoinableAdapter):
    """An LR scheduler: steps on joined ranks as on active ones, with the same arguments."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler
        self._step: Callable[..., None] = scheduler.step
        self._own = vars(scheduler).get("step")

    def enter(self, session: JoinSession, undo: ExitStack) -> None:
        scheduler = self._scheduler

        def step(*args: Any, **kwargs: Any) -> None:
            session.on_event(self, [_plain(args), _plain(kwargs)], begins_iteration=False)
            self._step(*args, **kwargs)

        def restore() -> None:
            if vars(scheduler).get("step") is not step:
                return
            # A step that was set on the instance is set again; the class's own needs no copy there.
            del scheduler.step
            if self._own is not None:
                scheduler.step = self._own  # type: ignore[method-assign]

        scheduler.step = step  # type: ignore[method-assign]
        undo.callback(restore)

    def replay(self, detail: Any) -> None:
        args, kwargs = detail
        self._step(*args, **kwargs)


def _plain(value: Any) -> Any:
    """Arguments as JSON can hold them: a metric is often a tensor of one element."""
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.item() if hasattr(value, "item") else value
