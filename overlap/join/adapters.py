"""What a Join does with each kind of joinable: reports its calls, and replays those of other ranks."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from enum import IntEnum
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.algorithms import join as base
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from overlap._torch.autograd import after_all_of_backward
from overlap._torch.c10d import issued
from overlap._torch.join import JoinedDDP, on_notify
from overlap._torch.optimizer import after_steps, all_of, is_scheduled, runs_step_hooks, watch_steps
from overlap._torch.read_only import AppliedGradient, Attempt, Terms
from overlap.errors import ConfigurationError, TrainingLoopError, UnsupportedError

if TYPE_CHECKING:
    from overlap.join.participation import JoinSession

__all__ = [
    "Call",
    "DDPAdapter",
    "Hyperparameters",
    "JoinHookAdapter",
    "JoinableAdapter",
    "OptimizerAdapter",
    "ReplayedGradients",
    "SchedulerAdapter",
    "once_after",
    "schedule_of",
]

_LOCKSTEP = (
    'use Join(..., on_exhausted="stop"), which keeps all ranks in step, with `for batch in join.iterate(loader)`'
)


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
        joinable = self._joinable

        def before_call() -> None:
            if isinstance(joinable, Optimizer):
                session.gradients.before_step(joinable)
            session.on_call(self, Call.STEP)

        undo.callback(on_notify(joinable, before_call))
        if isinstance(joinable, Optimizer) and runs_step_hooks(joinable):
            undo.callback(after_steps(joinable, session.after_step))

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
        undo.callback(after_steps(self._optimizer, session.after_step))

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


def schedule_of(joinable: object) -> LRScheduler | None:
    """The LR scheduler that ``joinable`` is or wraps, as Accelerate's does, whose ``step()`` makes one of it for each
    process."""
    inner = getattr(joinable, "scheduler", None) if type(joinable).__name__ == "AcceleratedScheduler" else joinable
    return inner if isinstance(inner, LRScheduler) else None


class SchedulerAdapter(JoinableAdapter):
    """An LR scheduler, or a wrapper of one: steps on joined ranks as on active ones."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler)
        self._scheduler, self._step = scheduler, scheduler.step

    def enter(self, session: JoinSession, undo: ExitStack) -> None:
        def step(*args: Any, **kwargs: Any) -> None:
            if args or kwargs:
                raise UnsupportedError(
                    f"{self.name}.step() is given an argument, which ranks without inputs do not have: call it without "
                    "one, or after the block of Join"
                )
            gradients = getattr(self._scheduler, "gradient_state", None)
            if gradients is not None and not gradients.sync_gradients:
                self._step()  # Accelerate's, which makes no step while gradients accumulate.
                return
            session.on_call(self, Call.STEP)
            self._step()
            session.after_step()

        attributes = vars(self._scheduler)
        before = {"step": attributes["step"]} if "step" in attributes else {}
        attributes["step"] = step
        undo.callback(attributes.update, before)
        undo.callback(attributes.pop, "step")

    def replay(self, call: Call, detail: Sequence[float] | None) -> None:
        self._step()


class DDPAdapter(JoinableAdapter):
    """Watches forwards (rebuilt buckets, buffers) and, apart from them, backwards that synchronize gradients.

    So joined ranks replay what happened: forwards without a backward, one backward of several forwards, accumulation
    under ``no_sync``.
    """

    calls = (Call.FORWARD, Call.BACKWARD)
    precedence = 2

    def __init__(self, ddp: DistributedDataParallel, hook: base.JoinHook, *, shadows: bool) -> None:
        super().__init__(ddp, hook)
        self._ddp, self._checks_forward = ddp, shadows
        self._joined = JoinedDDP(ddp)
        self._issued: int | None = None
        # Of this rank's gradients; None until a backward needs it.
        self._weight: float | None = None
        self._expects_backward = False
        # Whether the last forward was under no_sync, and whether .grad has what was added up so since the last
        # synchronized backward.
        self._accumulates = self._has_own = False
        self._backward_hook: Any = None
        self._session: JoinSession | None = None
        for name, module in ddp.module.named_modules():
            if shadows and isinstance(module, nn.SyncBatchNorm):
                raise UnsupportedError(
                    f"{name or 'the model'} is a SyncBatchNorm, whose collectives in forward a rank without inputs "
                    f"cannot answer; {_LOCKSTEP}"
                )
        if shadows and self._joined.has_buffer_hook:
            raise UnsupportedError(f"a hook that was registered on the model synchronizes its buffers; {_LOCKSTEP}")

    def enter(self, session: JoinSession, undo: ExitStack) -> None:
        hook = self._joined.hook_name
        if session.divides_by_count and hook is not None and not hook.startswith("overlap"):
            raise UnsupportedError(
                f"the hook {hook} divides by the number of all ranks, whatever the Join's options; register one of "
                "overlap.hooks, or leave out divide_by_initial_world_size=False"
            )
        self._session = session
        self._expects_backward = self._accumulates = self._has_own = False
        undo.callback(session.gradients.take_back)
        undo.callback(on_notify(self._ddp, torch.compiler.disable(lambda: self._on_forward(session))))
        undo.callback(self._joined.leave)
        undo.callback(self._watch_backward, False)
        self._joined.enter(lambda: session.buffer_source, torch.compiler.disable(self._before_module))
        # What a Join does in a forward does not belong to a compiled one.
        undo.callback(self._ddp.register_forward_hook(torch.compiler.disable(self._after_module)).remove)
        if session.counts_samples:
            # On parameters, not on outputs: those may depend on each other, and be in containers of any kind.
            for parameter in self._trained:
                undo.callback(parameter.register_hook(self._weigh).remove)

    # An active rank.

    def _on_forward(self, session: JoinSession) -> None:
        ddp = self._ddp
        records_gradients = torch.is_grad_enabled()
        has_buffers = bool(ddp.will_sync_module_buffers())
        if not (records_gradients or has_buffers):
            return  # Without collectives there is nothing to replay.
        synchronizes = records_gradients and bool(ddp.require_backward_grad_sync)
        if records_gradients:
            session.gradients.take_back()
            self._weight = None
        # Without collectives there is nothing to replay, and a poll may go on during the forward.
        session.on_call(
            self,
            Call.FORWARD,
            [records_gradients, has_buffers, synchronizes],
            has_collectives=has_buffers or self._joined.may_rebuild,
        )
        if synchronizes:
            self._expects_backward = True
            if session.divides_by_count and self._joined.hook_name is None:
                self._joined.divide_by(lambda: session.divisor)
        self._accumulates = records_gradients and not synchronizes
        self._watch_backward(session.watches_backward or self._accumulates)

    @property
    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self._ddp.parameters() if parameter.requires_grad]

    def _weigh(self, gradient: Tensor) -> Tensor:
        if self._weight is None:
            assert self._session is not None, "gradients are weighed inside of the block"
            self._weight = self._session.gradient_weight
        return gradient if self._weight == 1.0 else gradient * self._weight

    def _watch_backward(self, is_watched: bool) -> None:
        if is_watched == (self._backward_hook is not None):
            return
        if is_watched:
            self._backward_hook = torch.autograd.graph.register_multi_grad_hook(
                self._trained, self._on_first_gradient, mode="any"
            )
        else:
            self._backward_hook.remove()
            self._backward_hook = None

    def _on_first_gradient(self, gradient: Tensor) -> None:
        session = self._session
        assert session is not None, "backwards are watched inside of the block"
        # Not under no_sync, and only once where a checkpointed backward runs in parts.
        if self._expects_backward:
            self._expects_backward = self._has_own = False
            session.on_call(self, Call.BACKWARD)
            if session.missing:
                after_all_of_backward(lambda: session.gradients.hand_over(self._trained))
        elif self._accumulates:
            self._has_own = True

    def _before_module(self) -> None:
        if self._checks_forward:
            self._issued = issued(self._ddp.process_group)

    def _after_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._checks_forward:
            self._checks_forward = False
            if self._issued != issued(self._ddp.process_group):
                raise UnsupportedError(
                    "the model issues collectives of its own in forward, which a rank without inputs cannot answer; "
                    f"{_LOCKSTEP}"
                )

    # A rank without inputs.

    def replay(self, call: Call, detail: Sequence[float] | None) -> None:
        session = self._session
        assert session is not None, "a Join replays inside of its block"
        session.gradients.take_back()
        if call is Call.BACKWARD:
            self._replay_backward(session)
            return
        records_gradients, has_buffers, synchronizes = detail or (True, self._ddp.will_sync_module_buffers(), True)
        self._joined.replay_forward(
            records_gradients=bool(records_gradients),
            buffers_from=session.buffer_source if has_buffers else None,
            synchronizes=bool(synchronizes),
        )

    def _replay_backward(self, session: JoinSession) -> None:
        session.replays_own_gradients, self._has_own = self._has_own, False
        try:
            self._joined.replay_backward(
                own_gradients_by=session.divisor if session.replays_own_gradients else None, poll=session.board.poll
            )
        finally:
            session.replays_own_gradients = False


class ReplayedGradients(Terms):
    """Gradients of a backward that ranks without inputs replay: read-only until ``step()``, since those ranks step with
    the mean that backward left. See [Note: applied gradients are read-only]."""

    def __init__(self, missing: Callable[[], list[int]]) -> None:
        self._missing = missing
        self._handed: dict[int, tuple[Tensor, AppliedGradient]] = {}

    def hand_over(self, parameters: Iterable[Tensor]) -> None:
        """A backward is over that ranks without inputs have replayed."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse and not isinstance(gradient, AppliedGradient):
                handed = AppliedGradient(gradient, gradient, weakref.ref(parameter), self)
                self._handed[id(parameter)] = parameter, handed
                parameter.grad = handed

    def before_step(self, optimizer: Optimizer) -> None:
        """Called before ``optimizer`` steps. Raises: TrainingLoopError: the loop has put another gradient there."""
        if self._handed:
            # A step of this rank alone is not replayed: its gradients go back as they are.
            is_alone = getattr(optimizer, "steps_alone", False)
            self.take_back(None if is_alone else (each for group in optimizer.param_groups for each in group["params"]))

    def take_back(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Put ordinary tensors back into ``.grad`` of ``parameters``; by default of all, also of those assigned to."""
        keys = (
            list(self._handed) if parameters is None else [id(each) for each in parameters if id(each) in self._handed]
        )
        for parameter, handed in [self._handed.pop(key) for key in keys]:
            if parameter.grad is handed:
                parameter.grad = handed.plain
            elif parameters is not None:
                self.refuse(handed, Attempt.WRITE)

    def refuse(self, gradient: AppliedGradient, attempt: Attempt) -> NoReturn:
        raise TrainingLoopError(
            "gradients cannot be changed between backward and step() (by clipping or GradScaler, say) while ranks "
            f"{self._missing()} have run out of inputs and step with the mean that backward left: clip with "
            "Step(optimizer, clip_grad_norm=...), ZeroStep(zero, clip_grad_norm=...) or "
            "LocalSGD(..., transforms=[ClipGradNorm(...)]), and leave GradScaler out (bfloat16 needs none)"
        )


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
