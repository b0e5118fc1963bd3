"""How a Join serves each kind of joinable: it reports its calls, and replays those of other ranks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta
from enum import IntEnum
from itertools import islice
from numbers import Real
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import Work
from torch.distributed.algorithms import join as base
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from overlap._checks import check_ddp, type_name
from overlap._torch.autograd import after_all_of_backward
from overlap._torch.c10d import bucket_gradients, issued
from overlap._torch.ddp import hook_name
from overlap._torch.join import on_notify
from overlap._torch.optimizer import all_of, is_scheduled, runs_step_hooks, watch_steps
from overlap._torch.read_only import DeniedAccess, GradAccessPolicy, GuardedGradient
from overlap.errors import ConfigurationError, TrainingLoopError, UnsupportedError
from overlap.ranks.board import Board

# How long to wait for a bucket before polling whether another rank has failed.
_POLL_INTERVAL_S = 1.0
_LOCKSTEP = (
    'use Join(..., on_exhausted="stop"), which keeps all ranks in step, with `for batch in join.iterate(loader)`'
)


class Call(IntEnum):
    """A call of an active rank, which a rank without inputs repeats, unless it is an announcement alone."""

    BEGIN = 0  # Of an iteration.
    FORWARD = 1
    BACKWARD = 2
    STEP = 3  # Of an optimizer or a scheduler; or whatever else notifies the Join.
    READY = 4  # To synchronize gradients in backward.
    LEAVE = 5  # The block, with on_exhausted="stop".


class Port(Protocol):
    """The part of a Join that its adapters use."""

    shadows: bool
    divides_by_count: bool
    replays_own_gradients: bool
    after_replay: list[Callable[[], None]]
    gradients: ReplayedGradients
    board: Board

    @property
    def missing(self) -> list[int]: ...
    @property
    def divisor(self) -> int: ...
    @property
    def buffer_source(self) -> int: ...
    def on_call(
        self, adapter: Adapter, call: Call, detail: Sequence[float] = (), *, has_collectives: bool = True
    ) -> None: ...


def adapter_of(joinable: Any, join: Port, kwargs: dict[str, Any]) -> Adapter:
    """For ``joinable`` under ``join``, whose ``kwargs`` are given to its hook."""
    if isinstance(joinable, type):
        raise ConfigurationError(f"{type_name(joinable)} is not a joinable, which is an object: make it first")
    if isinstance(joinable, DistributedDataParallel):
        return DDPAdapter(joinable, join, joinable.join_hook(**kwargs))
    if isinstance(joinable, base.Joinable):
        if not hasattr(joinable, "_join_config"):
            raise ConfigurationError(f"{type(joinable).__name__}.__init__ does not call Joinable.__init__")
        hook = joinable.join_hook(**kwargs)
        return StepAdapter(joinable, join, on_notify, hook.main_hook, hook)
    if schedule_of(joinable) is not None:
        return StepAdapter(joinable, join, _before_scheduler, joinable.step)
    if isinstance(joinable, Optimizer):
        if not runs_step_hooks(joinable):
            raise ConfigurationError(
                f"{type(joinable).__name__} runs no step hooks, so a Join would not see its step(); give Join the "
                "optimizer that it wraps"
            )
        return StepAdapter(joinable, join, _before_optimizer, lambda: joinable.step())  # noqa: PLW0108 - it may be replaced
    if isinstance(joinable, nn.Module):
        check_ddp(joinable)
    raise ConfigurationError(
        f"{type_name(joinable)} is not a Joinable (nor an optimizer or LR scheduler): Join takes models in "
        "DistributedDataParallel and subclasses of torch.distributed.algorithms.join.Joinable"
    )


class StepAdapter:
    """A joinable whose calls are all alike: each on an active rank is repeated once.

    Args:
        joinable: any with a hook of its own; or a plain optimizer, which on ranks without inputs steps with the
            gradients that DDP's replay leaves; or an LR scheduler.
        watch: calls a function before each call of ``joinable``; returns a function that undoes this.
        repeat: the same call on a rank without inputs.
    """

    def __init__(
        self,
        joinable: Any,
        join: Port,
        watch: Callable[[Any, Callable[[], None]], Callable[[], None]],
        repeat: Callable[[], Any],
        hook: base.JoinHook | None = None,
    ) -> None:
        self.hook = hook
        self._joinable, self._join, self._watch, self._repeat = joinable, join, watch, repeat

    def enter(self, undo: ExitStack) -> None:
        """Begin to report: the block begins. ``undo`` is closed when it is over, with or without an exception."""
        undo.callback(self._watch(self._joinable, self._before_call))

    def _before_call(self) -> None:
        if isinstance(self._joinable, Optimizer):
            self._join.gradients.before_step(self._joinable)
        self._join.on_call(self, Call.STEP)

    def replay(self, call: Call, detail: Sequence[float]) -> None:
        self._repeat()


def _before_optimizer(optimizer: Optimizer, before_call: Callable[[], None]) -> Callable[[], None]:
    def before_step(_: Optimizer, args: Any, kwargs: Any) -> None:
        if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step(closure) under Join: ranks that have run out of inputs repeat the "
                "forward and the backward before the step, so call closure() first and then step() without it, or use "
                "an optimizer that needs no closure"
            )
        before_call()

    return watch_steps(optimizer, before_step)


def schedule_of(joinable: object) -> LRScheduler | None:
    """The LR scheduler that ``joinable`` is, or has as ``.scheduler`` to step it, as Accelerate's wrapper does."""
    if isinstance(joinable, Optimizer | torch.nn.Module):
        return None  # It may have a scheduler as an attribute, and is no wrapper of it.
    inner = joinable if isinstance(joinable, LRScheduler) else getattr(joinable, "scheduler", None)
    return inner if isinstance(inner, LRScheduler) else None


def _before_scheduler(scheduler: Any, before_call: Callable[[], None]) -> Callable[[], None]:
    original, attributes = scheduler.step, vars(scheduler)
    own = {"step": attributes["step"]} if "step" in attributes else {}

    def step(*args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            raise UnsupportedError(
                f"{type(scheduler).__name__}.step() is given an argument, which ranks without inputs do not have: call "
                "it without one, or after the block of Join"
            )
        gradients = getattr(scheduler, "gradient_state", None)
        if gradients is None or gradients.sync_gradients:  # Accelerate's makes no step while gradients accumulate.
            before_call()
        original()

    def undo() -> None:
        del attributes["step"]
        attributes.update(own)

    attributes["step"] = step
    return undo


class DDPAdapter:
    """Watches forwards (rebuilt buckets, buffers) and, apart from them, backwards that synchronize gradients.

    So joined ranks replay every loop: forwards without a backward, one backward of several forwards, accumulation
    under ``no_sync``. DDP has no public way in: the private names here are those that it joins with itself.
    """

    def __init__(self, ddp: DistributedDataParallel, join: Port, hook: base.JoinHook) -> None:
        self.hook = hook
        self._ddp, self._join = ddp, join
        self._count = _Count(join)
        # The number of collectives issued when the module's first forward began: it must not issue any of its own.
        self._issued: int | None = None
        self._checks_forward = join.shadows
        # By id, in the reducer's order. Asked for in advance: to look parameters up waits for gathers under way, and
        # those wait for the other ranks.
        self._reduced: list[int] = []
        self._expects_backward = False
        # Whether the last forward was under no_sync, and whether .grad has gradients added up so since the last
        # synchronized backward.
        self._accumulates = self._has_own = False
        for name, module in ddp.module.named_modules():
            if join.shadows and isinstance(module, nn.SyncBatchNorm):
                raise UnsupportedError(
                    f"{name or 'the model'} is a SyncBatchNorm, whose collectives in forward a rank without inputs "
                    f"cannot answer; {_LOCKSTEP}"
                )
        if join.shadows and hasattr(ddp, "buffer_hook"):
            raise UnsupportedError(f"a hook that was registered on the model synchronizes its buffers; {_LOCKSTEP}")

    @property
    def _divides_without_hook(self) -> bool:
        return self._join.divides_by_count and hook_name(self._ddp) is None

    def enter(self, undo: ExitStack) -> None:
        ddp, join = self._ddp, self._join
        hook = hook_name(ddp)
        if join.divides_by_count and hook is not None and not hook.startswith("overlap"):
            raise UnsupportedError(
                f"the hook {hook} divides by the number of all ranks, whatever the Join's options; register one of "
                "overlap.hooks, or leave out divide_by_initial_world_size=False"
            )
        if ddp.find_unused_parameters:
            self._reduced = [id(parameter) for parameter in ddp._build_params_for_reducer()[0]]
        undo.callback(join.gradients.take_back)
        undo.callback(on_notify(ddp, torch.compiler.disable(self._on_forward)))
        if self._divides_without_hook:
            undo.callback(lambda: ddp.reducer._set_forward_pass_work_handle(Work(), True))
        handle = torch.autograd.graph.register_multi_grad_hook(self._trained, self._on_first_gradient, mode="any")
        undo.callback(handle.remove)
        # DDP asks these of all ranks by a collective, and the Join knows the answers. Only PyTorch's joined ranks use
        # the second, which DDP asks when it is about to call the module.
        answers = {
            "_find_common_rank": lambda rank, condition: join.buffer_source,
            "_check_global_requires_backward_grad_sync": torch.compiler.disable(self._before_module),
        }
        for name, answer in answers.items():
            setattr(ddp, name, answer)
            undo.callback(vars(ddp).pop, name, None)
        undo.callback(ddp.register_forward_hook(torch.compiler.disable(self._after_module)).remove)

    # An active rank.

    def _on_forward(self) -> None:
        ddp, join = self._ddp, self._join
        records_gradients = torch.is_grad_enabled()
        has_buffers = bool(ddp.will_sync_module_buffers())
        if not (records_gradients or has_buffers):
            return  # Without collectives there is nothing to replay.
        synchronizes = records_gradients and bool(ddp.require_backward_grad_sync)
        if records_gradients:
            join.gradients.take_back()
        join.on_call(
            self,
            Call.FORWARD,
            [records_gradients, has_buffers, synchronizes],
            has_collectives=has_buffers or not ddp._has_rebuilt_buckets,
        )
        if synchronizes:
            self._expects_backward = True
            if self._divides_without_hook:
                ddp.reducer._set_forward_pass_work_handle(self._count, False)
        self._accumulates = records_gradients and not synchronizes

    def _before_module(self, is_joined_rank: bool) -> None:
        if self._checks_forward:
            self._issued = issued(self._ddp.process_group)

    def _after_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._checks_forward and self._issued != issued(self._ddp.process_group):
            raise UnsupportedError(
                "the model issues collectives of its own in forward, which a rank without inputs cannot answer; "
                f"{_LOCKSTEP}"
            )
        self._checks_forward = False

    @property
    def _trained(self) -> list[Tensor]:
        return [parameter for parameter in self._ddp.parameters() if parameter.requires_grad]

    def _on_first_gradient(self, gradient: Tensor) -> None:
        join = self._join
        # Not under no_sync, and only once where a checkpointed backward runs in parts.
        if self._expects_backward:
            self._expects_backward = self._has_own = False
            join.on_call(self, Call.BACKWARD)
            if join.missing:
                after_all_of_backward(lambda: join.gradients.hand_over(self._trained))
        elif self._accumulates:
            self._has_own = True

    # A rank without inputs.

    @torch.no_grad()
    def replay(self, call: Call, detail: Sequence[float]) -> None:
        ddp, join = self._ddp, self._join
        join.gradients.take_back()
        if call is Call.BACKWARD:
            join.replays_own_gradients, self._has_own = self._has_own, False
            self._replay_backward()
            join.replays_own_gradients = False
            return
        records_gradients, has_buffers, synchronizes = detail
        if records_gradients:
            self._rebuild()
        if has_buffers:
            ddp._assign_modules_buffers()
            ddp._sync_module_buffers(join.buffer_source)
        ddp.require_forward_param_sync = bool(synchronizes)

    def _rebuild(self) -> None:
        if self._ddp.reducer._rebuild_buckets():
            self._ddp._has_rebuilt_buckets = True

    def _replay_backward(self) -> None:
        """The collectives of a backward that the other ranks run; ``.grad`` then holds the mean of gradients.

        This rank contributes zeros, or the gradients that it had accumulated when it ran out.
        """
        ddp, join = self._ddp, self._join
        self._rebuild()
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        places = [
            (parameter, gradient)
            for bucket in buckets
            for parameter, gradient in zip(bucket.parameters(), bucket_gradients(bucket), strict=True)
        ]
        own: set[int] = set()
        if join.replays_own_gradients:
            divisor = join.divisor if hook_name(ddp) is None else 1
            for parameter, gradient in places:
                if parameter.grad is not None:
                    own.add(id(parameter))
                    torch.mul(parameter.grad, 1 / divisor, out=gradient)
        for bucket, future in [(bucket, ddp.reducer._run_comm_hook(bucket)) for bucket in buckets]:
            result = _result(future, join.board.poll)
            reduced = result[0] if isinstance(result, (list, tuple)) else result
            if reduced.data_ptr() != bucket.buffer().data_ptr() or reduced.dtype != bucket.buffer().dtype:
                bucket.buffer().copy_(reduced.view_as(bucket.buffer()))
        used = self._used_on_any_rank(own)
        for parameter, gradient in places:
            if used is not None and id(parameter) not in used:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.copy_(gradient)
        # Needed once: the next forward rebuilds the buckets in the order in which gradients came.
        ddp.reducer._push_all_rebuilt_params()
        ddp.require_forward_param_sync = True
        while join.after_replay:
            join.after_replay.pop(0)()

    def _used_on_any_rank(self, own: set[int]) -> set[int] | None:
        """The parameters, by ``id``, that a rank used; on this one ``own``. ``None`` where DDP does not look."""
        ddp = self._ddp
        if not ddp.find_unused_parameters or ddp.static_graph:
            return None
        used = ddp.reducer._get_local_used_map()
        # It still holds the result of the last pass.
        used.copy_(torch.tensor([each in own for each in self._reduced], device="cpu"))
        dist.all_reduce(used, group=ddp.process_group)
        return {each for each, count in zip(self._reduced, used.tolist(), strict=True) if count}


class _Count(Work):
    """For DDP's reducer: completed work whose result, the number to divide by, is computed when it is asked for."""

    def __init__(self, join: Port) -> None:
        super().__init__()
        self._join = join

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result([torch.tensor([self._join.divisor], device="cpu")])
        return future


def _result(future: torch.futures.Future[Any], poll: Callable[[], None]) -> Any:
    """As ``future.wait()``; calls ``poll`` about once a second, which raises where another rank has failed."""
    is_done = threading.Event()
    if not future.done():
        future.add_done_callback(lambda _: is_done.set())
        while not is_done.wait(_POLL_INTERVAL_S):
            poll()
    return future.wait()


Adapter = StepAdapter | DDPAdapter


class ReplayedGradients(GradAccessPolicy):
    """Gradients of a backward that ranks without inputs replay: read-only until ``step()``, since those ranks step with
    the mean that backward left. See [Note: guarded gradients]."""

    def __init__(self, join: Port) -> None:
        self._join = join
        self._handed: dict[int, tuple[Tensor, GuardedGradient]] = {}

    def hand_over(self, parameters: Iterable[Tensor]) -> None:
        """A backward is over that ranks without inputs have replayed."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse and not isinstance(gradient, GuardedGradient):
                handed = GuardedGradient(gradient, gradient, weakref.ref(parameter), self)
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
                self.refuse(handed, DeniedAccess.WRITE)

    def refuse(self, gradient: GuardedGradient, attempt: DeniedAccess) -> NoReturn:
        raise TrainingLoopError(
            "gradients cannot be changed between backward and step() (by clipping or GradScaler, say) while ranks "
            f"{self._join.missing} have run out of inputs and step with the mean that backward left: clip with "
            "ClipGradNorm(max_norm) in the chain or in LocalSGD(..., transforms=[ClipGradNorm(max_norm)]), and leave "
            "GradScaler out (bfloat16 needs none)"
        )


class Hyperparameters:
    """The numbers in the groups of the optimizers under a Join (learning rates, momenta, ...), as one flat list.

    A rank without inputs steps with its own, and after the block each rank does. So a number that the loop has set by
    hand is taken over, and one that a scheduler has set that is not given to the Join, and so did not step on ranks
    without inputs, is an error. Numbers on an accelerator are left out: to read one would stop the host.
    """

    # The keys that LR schedulers change.
    _SCHEDULED = ("lr", "momentum", "betas", "weight_decay")

    def __init__(self, joinables: Sequence[Any]) -> None:
        schedulers = [scheduler for each in joinables if (scheduler := schedule_of(each)) is not None]
        self._followed = {id(one) for scheduler in schedulers for one in all_of(scheduler.optimizer)}
        self._groups = {each: len(each.param_groups) for each in joinables if isinstance(each, Optimizer)}
        self._places = [
            (optimizer, number, key)
            for optimizer in self._groups
            for number, group in enumerate(optimizer.param_groups)
            for key, value in group.items()
            if key != "params" and _numbers(value)
        ]
        self.count = len(self.values())

    def values(self) -> list[float]:
        """Of this rank, now. Raises: TrainingLoopError: a group was added in the block."""
        for optimizer, count in self._groups.items():
            if len(optimizer.param_groups) != count:
                raise TrainingLoopError(
                    f"{type(optimizer).__name__} had {count} groups when Join was entered, and now has "
                    f"{len(optimizer.param_groups)}: ranks that have run out of inputs do not follow "
                    "add_param_group(), so call it before the block"
                )
        return [
            value for optimizer, number, key in self._places for value in _numbers(optimizer.param_groups[number][key])
        ]

    def follow(self, values: Sequence[float]) -> None:
        """Take over the :meth:`values` of another rank.

        Raises:
            TrainingLoopError: a scheduler of that rank has stepped, and the one here has not.
        """
        rest = iter(values)
        for optimizer, number, key in self._places:
            group = optimizer.param_groups[number]
            own = _numbers(group[key])
            if own == (others := list(islice(rest, len(own)))):
                continue
            is_followed = any(id(one) in self._followed for one in all_of(optimizer))
            if key in self._SCHEDULED and is_scheduled(optimizer) and not is_followed:
                raise TrainingLoopError(
                    f"{key} of {type(optimizer).__name__} is {own} on one rank and {others} on another, since its "
                    "scheduler did not step on ranks that had run out of inputs: give every scheduler of an optimizer "
                    "that is given to Join to it, too, as in Join([ddp, optimizer, scheduler])"
                )
            group[key] = _with_numbers(group[key], iter(others))


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
