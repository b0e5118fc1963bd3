"""Between stages, plain functions and DDP's communication hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from overlap._checks import described, told
from overlap._torch import classes
from overlap._torch.autograd import in_backward
from overlap._torch.c10d import GradBucket, is_future
from overlap.errors import ConfigurationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import future_result
from overlap.hooks.stage import Role, Stage
from overlap.hooks.stage_hook import StageHook
from overlap.hooks.wires.wire import Wire

__all__ = [
    "CommHook",
    "HookStage",
    "as_hook",
    "as_stage",
    "hook_name",
    "check_hook",
    "is_hook",
    "reducer",
    "shown",
    "stage_from",
    "to_stage",
]


Function = TypeVar("Function", bound=Callable[..., Any])


class CommHook(Protocol):
    """What ``ddp.register_comm_hook`` takes, under any names of its two parameters."""

    def __call__(self, state: Any, bucket: GradBucket, /) -> torch.futures.Future[torch.Tensor]: ...


def as_hook(stage: Stage | Callable[[Bucket], Any], *, group: dist.ProcessGroup | None = None) -> StageHook:
    """``stage`` as a hook ``(state, bucket) -> Future[Tensor]`` for code that calls ``ddp.register_comm_hook``.

    The hook ignores its state. A stage with memory serves one model: give each model its own hook.

    Args:
        stage: what the hook does; it must contain a reducer.
        group: the process group of the model; the default one where ``None``.

    >>> ddp.register_comm_hook(None, as_hook(Quantize(Int8())))
    >>> loss_fn(ddp(x), y).backward()
    """
    made = to_stage(stage)
    return StageHook(lambda state: made, repr(made), group_of=lambda state: group)


def as_stage(hook: CommHook | Callable[..., Any], state: Any = None) -> Stage:
    """The hook ``(state, bucket) -> Future[Tensor]`` as a reducer for a chain.

    Any callable of two arguments is accepted: functions, partials, lambdas, instances, under any argument names.

    Raises:
        ConfigurationError: ``hook`` cannot be called with a state and a bucket.

    >>> def hook(state, bucket):
    ...     future = torch.futures.Future()
    ...     future.set_result(bucket.buffer() / 2)
    ...     return future
    >>> chain(as_stage(hook), ClipGradNorm(1.0)).register(ddp)
    <chain(as_stage(hook), ClipGradNorm(1)) registered>
    >>> loss_fn(ddp(x), y).backward()
    """
    if isinstance(hook, StageHook):
        return hook.stage(state)
    if not is_hook(hook) and (isinstance(hook, Stage) or _takes_a_bucket(hook)) and state is None:
        return to_stage(hook)
    if not is_hook(hook):
        raise ConfigurationError(f"{shown(hook)} is not a hook, which is called with (state, bucket): {_remedy(hook)}")
    try:
        inspect.signature(hook).bind(state, None)
    except TypeError as error:
        raise ConfigurationError(
            f"the hook {hook_name(hook)} cannot be called with (state, bucket): {error}; "
            "a stage is a function of one bucket"
        ) from None
    except ValueError:
        pass  # A builtin may have no signature to look at.
    return HookStage(hook, state)


def reducer(function: Function) -> Function:
    """Marks a function of a bucket as one that turns this rank's gradients into their mean over ranks.

    Without it a function in a chain is a transform.

    Raises:
        ConfigurationError: ``function`` does not take one bucket.

    >>> @overlap.reducer
    ... async def mean(bucket):
    ...     await all_reduce(bucket.buffer, group=bucket.group)
    ...     bucket.buffer.div_(bucket.divisor)
    >>> chain(mean, Step(torch.optim.SGD(ddp.parameters(), lr=0.1)))
    chain(mean, Step(SGD, interleaved))
    """
    if not _takes_a_bucket(function):
        raise ConfigurationError(f"@reducer marks a function of one bucket, got {shown(function)}")
    function.role = Role.REDUCER  # type: ignore[attr-defined]
    return function


def to_stage(thing: object) -> Stage:
    """``thing`` as a stage: a stage as it is, a function of a bucket wrapped.

    Raises:
        ConfigurationError: ``thing`` is neither.
    """
    if isinstance(thing, Stage):
        return thing
    if _takes_a_bucket(thing):
        return _FunctionStage(thing)  # type: ignore[arg-type]
    if isinstance(thing, StageHook):
        raise ConfigurationError(f"{thing!r} is a hook already, not a stage; as a stage it is as_stage(hook, state)")
    raise ConfigurationError(f"{shown(thing)} is not a stage: {_remedy(thing)}")


_CLIPS = {
    torch.nn.utils.clip_grad_norm_: "write ClipGradNorm(max_norm)",
    torch.nn.utils.clip_grad_value_: "write a function, def clip_value(bucket): bucket.buffer.clamp_(-value, value)",
}


def _is_optimizer(thing: object) -> bool:
    return isinstance(getattr(thing, "__self__", thing), Optimizer)  # Its step() is often given, too.


def _is_clip(thing: object) -> bool:
    return any(thing is clip for clip in _CLIPS)


# Mistakes that people make, and what to write instead.
_REMEDIES: tuple[tuple[Callable[[Any], bool], Callable[[Any], str]], ...] = (
    (lambda thing: isinstance(thing, type), lambda cls: f"it is a class; write {cls.__name__}(...)"),
    (lambda thing: isinstance(thing, Wire), lambda wire: f"write Quantize({wire!r})"),
    (lambda thing: isinstance(thing, classes.ZeroRedundancyOptimizer), lambda zero: "write chain(ZeroStep(zero))"),
    (_is_optimizer, lambda optimizer: "write chain(AllReduce(), Step(optimizer))"),
    (lambda thing: isinstance(thing, list | tuple), lambda stages: "give stages one by one, as in chain(*stages)"),
    (_is_clip, _CLIPS.__getitem__),
)


def _remedy(thing: object) -> str:
    for is_it, remedy in _REMEDIES:
        if is_it(thing):
            return remedy(thing)
    return (
        "a stage is an overlap.Stage or a function of one bucket; a DDP communication hook becomes one with "
        "overlap.hooks.as_stage(hook, state)"
    )


def _is_never_a_hook(thing: object) -> bool:
    """Whether ``thing`` can be called with two arguments and is yet known to be something else."""
    return isinstance(thing, nn.Module | type) or _is_optimizer(thing) or _is_clip(thing)


def shown(thing: object) -> str:
    """``thing`` in a message: as it is typed where that is short, by its name if it is a function, or its class."""
    if inspect.isroutine(thing):
        return hook_name(thing)
    typed = told(thing)
    is_typed = len(typed) <= 40 and "\n" not in typed and " at 0x" not in typed and not isinstance(thing, type)
    return typed if is_typed else described(thing)


def stage_from(thing: object, state: Any = None) -> Stage:
    """``thing`` as a stage, by :func:`as_stage` with ``state`` if it is a hook and by :func:`to_stage` otherwise."""
    return as_stage(thing, state) if is_hook(thing) else to_stage(thing)  # type: ignore[arg-type]


def is_hook(thing: object) -> bool:
    """Whether ``thing`` may be a communication hook: a callable that is neither a stage nor a function of a bucket."""
    if not callable(thing) or isinstance(thing, Stage) or _is_never_a_hook(thing):
        return False
    return not _takes_a_bucket(thing)


def check_hook(thing: object) -> None:
    """Check what can be checked of a hook or a stage before its state is known.

    Raises:
        ConfigurationError: ``thing`` is neither.
    """
    if not isinstance(thing, StageHook):
        stage_from(thing)


def hook_name(hook: object) -> str:
    """The name of ``hook`` in messages."""
    function = getattr(hook, "func", hook)  # functools.partial
    name: str = getattr(function, "__name__", None) or type(function).__name__
    return name.removeprefix("overlap.")


def _takes_a_bucket(thing: object) -> bool:
    """Whether ``thing`` is a function of a bucket: ``async``, or a plain one that must be given one argument."""
    if isinstance(thing, Stage | StageHook | type) or not callable(thing) or _is_never_a_hook(thing):
        return False
    if _is_async(thing):
        return True
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    is_variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    must = [p for p in positional if p.default is p.empty]
    return len(must) == 1 and not is_variadic


def _is_async(thing: object) -> bool:
    return inspect.iscoroutinefunction(thing) or inspect.iscoroutinefunction(getattr(thing, "__call__", None))  # noqa: B004


class _FunctionStage(Stage):
    """A function of a bucket as a stage."""

    def __init__(self, function: Callable[[Bucket], Any]) -> None:
        self._function = function
        self.role = Role(getattr(function, "role", Role.TRANSFORM))

    async def __call__(self, bucket: Bucket) -> None:
        result = self._function(bucket)
        if inspect.isawaitable(result):
            result = await result
        if result is not None:
            raise ConfigurationError(
                f"{self!r} returned {type(result).__name__}: a function of a bucket changes bucket.buffer (or the "
                "parameters) in place and returns nothing; a communication hook is called with (state, bucket)"
            )

    @property
    def signature(self) -> str:
        return getattr(self._function, "__name__", None) or type(self._function).__name__

    def __repr__(self) -> str:
        return self.signature


class HookStage(Stage):
    """A communication hook as a reducer.

    The hook is called where DDP would call it, on autograd's thread when its bucket arrives, and runs its collectives
    on the group that it chooses. A hook that launches collectives from callbacks remains at risk on Gloo, as in DDP.
    """

    def __init__(self, hook: CommHook, state: Any) -> None:
        self._hook = hook
        self._state = state

    @property
    def starts_on_autograd_thread(self) -> bool:
        return True

    async def __call__(self, bucket: Bucket) -> None:
        if not (in_backward() or bucket.is_replay):
            raise ConfigurationError(
                f"{self!r} must be called where DDP calls hooks, when its bucket arrives, but a transform before it "
                "awaits something first: put that transform after the hook"
            )
        raw = bucket.raw if bucket.raw is not None else _RawBucket(bucket)
        future = self._hook(self._state, raw)  # type: ignore[arg-type]
        if not is_future(future):
            raise ConfigurationError(
                f"the hook {hook_name(self._hook)} returned {type(future).__name__}; "
                "a hook returns a torch.futures.Future"
            )
        result = await future_result(future)
        reduced = result[0] if isinstance(result, (list, tuple)) else result
        if isinstance(reduced, Exception):
            raise reduced  # Future.set_exception stores the exception as the value.
        if reduced.data_ptr() != bucket.buffer.data_ptr() or reduced.dtype != bucket.buffer.dtype:
            bucket.buffer.copy_(reduced.view_as(bucket.buffer))

    @property
    def hook(self) -> tuple[Any, Any]:
        """The hook and its state."""
        return self._hook, self._state

    @property
    def signature(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        return f"as_stage({hook_name(self._hook)})"


class _RawBucket:
    """Has the methods of DDP's own bucket, for a bucket whose buffer a wrapping stage has replaced."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def index(self) -> int:
        return self._bucket.index

    def is_last(self) -> bool:
        return self._bucket.is_last

    def buffer(self) -> torch.Tensor:
        return self._bucket.buffer

    def gradients(self) -> list[torch.Tensor]:
        # Contiguous whatever the strides of the parameters, as DDP's own: hooks flatten them.
        gradients = self._bucket.gradients
        parts = self._bucket.buffer.split([gradient.numel() for gradient in gradients])
        return [part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        return list(self._bucket.parameters)

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._bucket = self._bucket.with_buffer(buffer)
