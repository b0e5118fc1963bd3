"""What a Join does with each kind of joinable: reports its calls, and replays those of other ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from enum import IntEnum
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor
from torch.distributed.algorithms import join as base
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from overlap._torch.join import on_notify
from overlap._torch.optimizer import all_of, is_scheduled, runs_step_hooks, watch_steps
from overlap.errors import ConfigurationError, TrainingLoopError, UnsupportedError

if TYPE_CHECKING:
    from overlap.join.participation import JoinSession

__all__ = [
    "Call",
    "Hyperparameters",
    "JoinHookAdapter",
    "JoinableAdapter",
    "OptimizerAdapter",
    "SchedulerAdapter",
    "once_after",
]


class Call(IntEnum):
    """What an active rank does, and a rank without inputs repeats."""

    BEGIN = 0  # Of an iteration.
    FORWARD = 1
    BACKWARD = 2
    STEP = 3  # Of an optimizer or a scheduler; or whatever else notifies the Join.


class JoinableAdapter(ABC):
    """A joinable under one Join: reports this rank's calls, and replays those of others on a rank without inputs."""

    calls: ClassVar[tuple[Call, ...]] = (Call.STEP,)
    """What a regular iteration has of it."""
    precedence = 0
    """Where no loader is iterated, iterations begin with the first adapter of the highest precedence."""

    def __init__(self, joinable: Any, hook: base.JoinHook | None = None) -> None:
        self.hook = hook
        self.name = type(joinable).__name__

    @abstractmethod
    def enter(self, session: JoinSession, undo: ExitStack) -> None:
        """Begin to report: the block begins. ``undo`` is closed when it is over, with or without an exception."""

    @abstractmethod
    def replay(self, call: Call, detail: Sequence[float] | None) -> None:
        """Repeat ``call`` on a rank without inputs, by its ``detail``; ``None``: as in a regular iteration."""


class JoinHookAdapter(JoinableAdapter):
    """Any joinable, by its own hook: each notification on active ranks is one ``main_hook`` on those that joined."""

    precedence = 1

    def __init__(self, joinable: base.Joinable, hook: base.JoinHook) -> None:
        super().__init__(joinable, hook)
        if not hasattr(joinable, "_join_config"):
            raise ConfigurationError(f"{self.name}.__init__ does not call Joinable.__init__")
        self._joinable, self._main_hook = joinable, hook.main_hook

    def enter(self, session: JoinSession, undo: ExitStack) -> None:
        def before_call() -> None:
            if isinstance(self._joinable, Optimizer):
                session.gradients.before_step(self._joinable)
            session.on_call(self, Call.STEP)

        undo.callback(on_notify(self._joinable, before_call))

    def replay(self, call: Call, detail: Sequence[float] | None) -> None:
        self._main_hook()


class OptimizerAdapter(JoinableAdapter):
    """A plain optimizer: steps on joined ranks as on active ones, with the gradients that DDP's replay leaves."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        if not runs_step_hooks(optimizer):
            raise ConfigurationError(
                f"{self.name} runs no step hooks, so a Join would not see its step(); give Join the optimizer that it "
                "wraps"
            )
        self._optimizer = optimizer

    def enter(self, session: JoinSession, undo: ExitStack) -> None:
        def report() -> None:
            session.gradients.before_step(self._optimizer)
            session.on_call(self, Call.STEP)

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            closure = args[1] if len(args) > 1 else kwargs.pop("closure", None)
            if closure is None:
                report()
                return None
            # The closure's forward and backward come before the step.
            return (args[0], once_after(closure, report), *args[2:]), kwargs

        undo.callback(watch_steps(self._optimizer, before_step))

    def replay(self, call: Call, detail: Sequence[float] | None) -> None:
        self._optimizer.step()


def once_after(closure: Callable[[], Any], then: Callable[[], None]) -> Callable[[], Any]:
    """``closure``, and ``then`` when it is done, which ranks without inputs replay: so it may be called once."""
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
    """An LR scheduler: steps on joined ranks as on active ones."""

    def __init__(self, scheduler: LRScheduler) -> None:
        super().__init__(scheduler)
        self._scheduler, self._step = scheduler, scheduler.step

    def enter(self, session: JoinSession, undo: ExitStack) -> None:
        def step(*args: Any, **kwargs: Any) -> None:
            if args or kwargs:
                raise UnsupportedError(
                    f"{self.name}.step() is given an argument, which ranks without inputs do not have: call it without "
                    "one, or after the block of Join"
                )
            session.on_call(self, Call.STEP)
            self._step()
            session.after_schedule()

        attributes = vars(self._scheduler)
        if "step" in attributes:
            undo.callback(attributes.update, step=attributes["step"])
        else:
            undo.callback(attributes.pop, "step")
        attributes["step"] = step

    def replay(self, call: Call, detail: Sequence[float] | None) -> None:
        self._step()


class Hyperparameters:
    """The numbers in the groups of the optimizers under a Join (learning rates, momenta, ...), as one flat list.

    A rank without inputs steps with its own, and after the block each rank does. So a number that the loop has set by
    hand is taken over, and one that a scheduler has set that is not given to the Join, and so did not step on ranks
    without inputs, is an error. Numbers on an accelerator are left out: to read one would stop the host.

    Args:
        optimizers: under the Join.
        schedulers: under the Join, too: they step on every rank.
    """

    # What LR schedulers change.
    _SCHEDULED = ("lr", "momentum", "betas", "weight_decay")

    def __init__(self, optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler]) -> None:
        self._followed = {id(one) for scheduler in schedulers for one in all_of(scheduler.optimizer)}
        self._groups = [(optimizer, len(optimizer.param_groups)) for optimizer in optimizers]
        self._keys = [
            (optimizer, number, key)
            for optimizer in optimizers
            for number, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if key != "params" and _numbers(value)
        ]
        self.count = len(self.values())

    def values(self) -> list[float]:
        """Of this rank, now. Raises: TrainingLoopError: a group was added in the block."""
        for optimizer, number in self._groups:
            if len(optimizer.param_groups) != number:
                raise TrainingLoopError(
                    f"{type(optimizer).__name__} had {number} groups when Join was entered, and now has "
                    f"{len(optimizer.param_groups)}: ranks that have run out of inputs do not follow "
                    "add_param_group(), so call it before the block"
                )
        return [
            value for optimizer, number, key in self._keys for value in _numbers(optimizer.param_groups[number][key])
        ]

    def changed_since(self, values: Sequence[float]) -> str | None:
        """The first value that differs from those of before, in words; ``None`` where none does."""
        if self.values() != values:
            for optimizer, _, key, own, former in self._beside(values):
                if own != former:
                    return f"{key} of {type(optimizer).__name__} went from {former} to {own}"
        return None

    def follow(self, values: Sequence[float]) -> None:
        """Take over the :meth:`values` of another rank.

        Raises:
            TrainingLoopError: a scheduler of that rank has stepped, and the one here has not.
        """
        for optimizer, number, key, own, others in self._beside(values):
            if own != others:
                self._check_unscheduled(optimizer, key, own, others)
                group = optimizer.param_groups[number]
                group[key] = _with_numbers(group[key], iter(others))

    def _beside(self, values: Sequence[float]) -> Iterator[tuple[Optimizer, int, str, list[float], list[float]]]:
        """Of each key its optimizer, the place of its group, its numbers here, and those in ``values``."""
        rest = iter(values)
        for optimizer, number, key in self._keys:
            own = _numbers(optimizer.param_groups[number][key])
            yield optimizer, number, key, own, list(islice(rest, len(own)))

    def _check_unscheduled(self, optimizer: Optimizer, key: str, own: list[float], others: list[float]) -> None:
        if key not in self._SCHEDULED or not is_scheduled(optimizer):
            return
        if any(id(one) in self._followed for one in all_of(optimizer)):
            return
        raise TrainingLoopError(
            f"{key} of {type(optimizer).__name__} is {own} on this rank and {others} on another, since its scheduler "
            "did not step on ranks that had run out of inputs: give every scheduler of an optimizer that is given to "
            "Join to it, too, as in Join([ddp, optimizer, scheduler])"
        )


def _numbers(value: Any) -> list[float]:
    """Those in ``value``, a number or a tuple of some; none of anything else."""
    if isinstance(value, (tuple, list)):
        return [number for each in value for number in _numbers(each)]
    if isinstance(value, Tensor):
        return [value.item()] if value.device.type == "cpu" and value.numel() == 1 else []
    return [float(value)] if isinstance(value, Real) else []


def _with_numbers(value: Any, numbers: Iterator[float]) -> Any:
    """``value``, with ``numbers`` in the places of its own."""
    if isinstance(value, (tuple, list)):
        return type(value)(_with_numbers(each, numbers) for each in value)
    if not _numbers(value):
        return value
    number = next(numbers)
    if isinstance(value, Tensor):
        return value.fill_(number)
    same_type = type(value)(number)
    return same_type if same_type == number else number  # An integer may have become a fraction.
