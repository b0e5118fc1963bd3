"""How a Join watches and replays each kind of joinable."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from torch.distributed.algorithms import join as base
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from overlap._torch.join import NotifyingConfig, set_join_config
from overlap.errors import ConfigurationError
from overlap.join.options import JoinOptions

__all__ = ["JoinHookAdapter", "JoinableAdapter", "OptimizerAdapter", "SchedulerAdapter", "Session"]


class Session(Protocol):
    """What adapters ask their Join, and tell it."""

    @property
    def options(self) -> JoinOptions:
        """What the Join was told."""
        ...

    @property
    def count(self) -> int:
        """How many ranks have inputs in this iteration."""
        ...

    @property
    def buffer_source(self) -> int:
        """The rank whose buffers the others take over."""
        ...

    @property
    def gradient_weight(self) -> float:
        """What this rank's gradients are multiplied by, for a mean over samples."""
        ...

    @property
    def needs_backward_events(self) -> bool:
        """Whether ``on_backward`` must be called: a rank may join after the backward of this iteration."""
        ...

    def on_event(
        self, adapter: JoinableAdapter, detail: Any = None, *, begins_iteration: bool, delay_write: bool = False
    ) -> None:
        """Called before an active rank does what every active rank does, and joined ranks replay.

        Args:
            adapter: of the joinable that does it.
            detail: given to ``adapter.replay``, in values that JSON can hold; a callable is called for them once the
                iteration has begun.
            begins_iteration: whether a new iteration begins with it, where no loader is iterated.
            delay_write: whether joined ranks need not know of it before the next event.

        Raises:
            TrainingLoopError: this rank said that it would run fewer iterations.
            ConfigurationError: an option needs ``join.iterate``.
        """
        ...

    def on_backward(self, adapter: JoinableAdapter) -> None:
        """Called before an active rank reduces gradients."""
        ...


class JoinableAdapter(ABC):
    """A joinable under one Join: watches what its rank does, and replays it on a rank that has joined."""

    index: int = -1
    precedence: int = 0
    """Where no loader is iterated, iterations begin with the first adapter of the highest precedence."""

    @abstractmethod
    def enter(self, session: Session) -> None:
        """Begin to watch: the block begins."""

    @abstractmethod
    def leave(self) -> None:
        """Stop watching: the block is over, with or without an exception."""

    @abstractmethod
    def replay(self, detail: Any) -> None:
        """Do what ``detail`` says, on a rank that has joined."""

    def replay_backward(self) -> None:
        """Reduce gradients of zero, on a rank that has joined."""
        raise AssertionError(f"{self!r} has no backward")

    def post(self, *, is_last_joiner: bool) -> None:  # noqa: B027
        """Called when all ranks have joined."""


class JoinHookAdapter(JoinableAdapter):
    """Any joinable, by its own hook: each notification on active ranks is one ``main_hook`` on those that joined."""

    precedence = 1

    def __init__(self, joinable: base.Joinable, hook: base.JoinHook) -> None:
        if not hasattr(joinable, "_join_config"):
            raise ConfigurationError(f"{type(joinable).__name__}.__init__ does not call Joinable.__init__")
        self._joinable, self._hook = joinable, hook
        self._config: Any = None

    def enter(self, session: Session) -> None:
        config = NotifyingConfig(lambda: session.on_event(self, begins_iteration=True))
        self._config = set_join_config(self._joinable, config)

    def leave(self) -> None:
        if self._config is not None:
            set_join_config(self._joinable, self._config)
            self._config = None

    def replay(self, detail: Any) -> None:
        self._hook.main_hook()

    def post(self, *, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)


class OptimizerAdapter(JoinableAdapter):
    """A plain optimizer: steps on joined ranks as on active ones, with the gradients that DDP's replay leaves."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._handle: RemovableHandle | None = None

    def enter(self, session: Session) -> None:
        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            session.on_event(self, begins_iteration=False)

        self._handle = self._optimizer.register_step_pre_hook(before_step)

    def leave(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def replay(self, detail: Any) -> None:
        self._optimizer.step()


class SchedulerAdapter(JoinableAdapter):
    """An LR scheduler: steps on joined ranks as on active ones, with the same arguments."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler
        self._step: Callable[..., None] = scheduler.step
        self._own = vars(scheduler).get("step")
        self._watched: Callable[..., None] | None = None

    def enter(self, session: Session) -> None:
        def step(*args: Any, **kwargs: Any) -> None:
            session.on_event(self, [_plain(args), _plain(kwargs)], begins_iteration=False)
            self._step(*args, **kwargs)

        self._watched = step
        self._scheduler.step = step  # type: ignore[method-assign]

    def leave(self) -> None:
        if vars(self._scheduler).get("step") is self._watched:
            # A step that was set on the instance is set again; the class's own needs no copy there.
            del self._scheduler.step
            if self._own is not None:
                self._scheduler.step = self._own  # type: ignore[method-assign]

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
