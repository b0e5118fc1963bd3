"""What each joinable does at its Join's side."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.distributed.algorithms import join as base
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.hooks import RemovableHandle

from overlap._torch.join import Notifying, set_config
from overlap.errors import ConfigurationError

if TYPE_CHECKING:
    from overlap.join.course import Course

__all__ = ["HookMember", "Member", "OptimizerMember", "SchedulerMember"]


class Member(ABC):
    """A joinable under one Join: watches what its rank does, and does it again on a rank that has joined."""

    index: int = -1
    precedence: int = 0
    """Acts of the first member of the highest precedence begin iterations, where no loader is iterated."""

    @abstractmethod
    def enter(self, course: Course) -> None:
        """The block begins."""

    @abstractmethod
    def leave(self) -> None:
        """The block is over, whatever happened."""

    @abstractmethod
    def replay(self, detail: Any) -> None:
        """Do what ``detail`` says, on a rank that has joined."""

    def replay_backward(self) -> None:
        """Reduce gradients, on a rank that has joined."""
        raise AssertionError(f"{self!r} has no backward")

    def post(self, *, is_last_joiner: bool) -> None:  # noqa: B027
        """All ranks have joined."""


class HookMember(Member):
    """Any joinable, by its own hook: each notification on active ranks is one ``main_hook`` on those that joined."""

    precedence = 1

    def __init__(self, joinable: base.Joinable, hook: base.JoinHook) -> None:
        if not hasattr(joinable, "_join_config"):
            raise ConfigurationError(f"{type(joinable).__name__}.__init__ does not call Joinable.__init__")
        self._joinable, self._hook = joinable, hook
        self._config: Any = None

    def enter(self, course: Course) -> None:
        self._config = set_config(self._joinable, Notifying(lambda: course.on_act(self, begins_iteration=True)))

    def leave(self) -> None:
        if self._config is not None:
            set_config(self._joinable, self._config)
            self._config = None

    def replay(self, detail: Any) -> None:
        self._hook.main_hook()

    def post(self, *, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)


class OptimizerMember(Member):
    """A plain optimizer: steps on joined ranks as on active ones, with the gradients that DDP's replay leaves."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._handle: RemovableHandle | None = None

    def enter(self, course: Course) -> None:
        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            course.on_act(self, begins_iteration=False)

        self._handle = self._optimizer.register_step_pre_hook(before_step)

    def leave(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def replay(self, detail: Any) -> None:
        self._optimizer.step()


class SchedulerMember(Member):
    """An LR scheduler: steps on joined ranks as on active ones, with the same arguments."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self._scheduler = scheduler
        self._step: Callable[..., None] = scheduler.step
        self._own = vars(scheduler).get("step")
        self._watched: Callable[..., None] | None = None

    def enter(self, course: Course) -> None:
        def step(*args: Any, **kwargs: Any) -> None:
            course.on_act(self, [_plain(args), _plain(kwargs)], begins_iteration=False)
            self._step(*args, **kwargs)

        self._watched = step
        self._scheduler.step = step  # type: ignore[method-assign]

    def leave(self) -> None:
        if vars(self._scheduler).get("step") is self._watched:
            # Another step of its own comes back; a method of the class needs no copy in the instance.
            del self._scheduler.step
            if self._own is not None:
                self._scheduler.step = self._own  # type: ignore[method-assign]

    def replay(self, detail: Any) -> None:
        args, kwargs = detail
        self._step(*args, **kwargs)


def _plain(value: Any) -> Any:
    """Arguments as they travel: a metric is often a tensor of one element."""
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.item() if hasattr(value, "item") else value
