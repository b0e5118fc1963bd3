"""Between stages, plain functions and DDP's communication hooks."""

from __future__ import annotations

import inspect
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from overlap._checks import short_repr, type_name
from overlap._torch import classes
from overlap._torch.autograd import in_end_of_backward
from overlap._torch.c10d import GradBucket, is_future
from overlap.errors import ConfigurationError, RegistrationError, UnsupportedError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import future_result
from overlap.hooks.engine.runtime import NO_LAST_BUCKET, Runtime
from overlap.hooks.stage import Role, Stage, StageContext
from overlap.hooks.wires.codec import Wire

Function = TypeVar("Function", bound=Callable[..., Any])

_RUNTIMES = "_overlap_runtimes"
"""The attribute of a parameter."""


# To a stage.


def as_stage(hook: Callable[..., Any] | Stage, state: Any = None) -> Stage:
    """The hook ``(state, bucket) -> Future[Tensor]`` as a reducer for a chain.

    Any callable of two arguments is accepted: functions, partials, lambdas, instances, under any argument names. A
    function of one bucket becomes a stage, and a stage is returned as it is.

    Raises:
        ConfigurationError: ``hook`` cannot be called with a state and a bucket, nor with a bucket.

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
    if isinstance(hook, Stage) or _takes_a_bucket(hook):
        if state is not None:
            raise ConfigurationError(
                f"a stage keeps its own state, but {short_repr(state)} was given for {shown(hook)}"
            )
        if isinstance(hook, Stage) and (type(hook).__call__, type(hook).plan) == (Stage.__call__, Stage.plan):
            raise ConfigurationError(f"{shown(hook)} does nothing: give its class an async __call__(self, bucket)")
        return hook if isinstance(hook, Stage) else _FunctionStage(hook)
    if (remedy := _instead_of(hook)) is not None:
        raise ConfigurationError(f"{shown(hook)} is not a stage: {remedy}")
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


def check_hook(thing: object) -> None:
    """Raises: ConfigurationError: ``thing`` is neither a hook nor a stage; its state is not known yet."""
    if not isinstance(thing, StageHook):
        as_stage(thing)  # type: ignore[arg-type]


def hook_name(hook: object) -> str:
    function = getattr(hook, "func", hook)  # functools.partial
    name: str = getattr(function, "__name__", None) or type(function).__name__
    return name.removeprefix("overlap.")


def shown(thing: object) -> str:
    """``thing`` in a message: as it is typed where that is short, by its name if it is a function, or its class."""
    if inspect.isroutine(thing):
        return hook_name(thing)
    typed = short_repr(thing)
    is_typed = len(typed) <= 40 and "\n" not in typed and " at 0x" not in typed and not isinstance(thing, type)
    return typed if is_typed else type_name(thing)


def _takes_a_bucket(thing: Any) -> bool:
    """Whether ``thing`` is a function of a bucket: ``async``, or a plain one that must be given one argument."""
    if isinstance(thing, Stage | StageHook) or _instead_of(thing) is not None:
        return False
    if inspect.iscoroutinefunction(thing) or inspect.iscoroutinefunction(getattr(thing, "__call__", None)):  # noqa: B004
        return True
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    is_variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return len([p for p in positional if p.default is p.empty]) == 1 and not is_variadic


def _instead_of(thing: Any) -> str | None:
    """The code to write in place of ``thing``; ``None`` if it may be a hook."""
    function = getattr(thing, "func", thing)  # functools.partial
    if function is nn.utils.clip_grad_norm_:
        return "write ClipGradNorm(max_norm)"
    if function is nn.utils.clip_grad_value_:
        return "write a function, def clip_value(bucket): bucket.buffer.clamp_(-value, value)"
    if isinstance(thing, type):
        return f"it is a class; write {thing.__name__}(...)"
    if isinstance(thing, Wire):
        return f"write Quantize({thing!r})"
    if isinstance(thing, classes.ZeroRedundancyOptimizer):
        return "write chain(ZeroStep(zero))"
    if isinstance(getattr(thing, "__self__", thing), Optimizer):  # Its step() is often given, too.
        return "write chain(AllReduce(), Step(optimizer))"
    if isinstance(thing, list | tuple):
        return "give stages one by one, as in chain(*stages)"
    if callable(thing) and not isinstance(thing, nn.Module):
        return None
    return (
        "a stage is an overlap.Stage or a function of one bucket; a DDP communication hook becomes one with "
        "overlap.hooks.as_stage(hook, state)"
    )


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
    def as_code(self) -> str:
        return repr(self) if repr(self).isidentifier() else "your_function"

    def __repr__(self) -> str:
        return getattr(self._function, "__name__", None) or type(self._function).__name__


class HookStage(Stage):
    """A communication hook as a reducer.

    The hook runs its collectives on the group that it chooses, which may be the model's own. So all of the chain runs
    on autograd's thread, where DDP would call the hook. One that launches collectives from callbacks remains at risk on
    Gloo, as in DDP.
    """

    def __init__(self, hook: Callable[..., Any], state: Any) -> None:
        self.hook = hook, state
        """The hook and its state."""

    runs_inline = True

    async def __call__(self, bucket: Bucket) -> None:
        hook, state = self.hook
        if bucket.divisor != bucket.group.size():  # By which the hook divides.
            bucket.buffer.mul_(bucket.group.size() / bucket.divisor)
        future = hook(state, bucket.raw if bucket.raw is not None else _RawBucket(bucket))
        if not is_future(future):
            raise ConfigurationError(
                f"the hook {hook_name(hook)} returned {type(future).__name__}; a hook returns a torch.futures.Future"
            )
        result = await future_result(future)
        reduced = result[0] if isinstance(result, (list, tuple)) else result
        if isinstance(reduced, Exception):
            raise reduced  # Future.set_exception stores the exception as the value.
        if reduced.data_ptr() != bucket.buffer.data_ptr() or reduced.dtype != bucket.buffer.dtype:
            bucket.buffer.copy_(reduced.view_as(bucket.buffer))

    def __repr__(self) -> str:
        return f"as_stage({hook_name(self.hook[0])})"


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


# To a hook.


def as_hook(stage: Stage | Callable[[Bucket], Any], *, group: dist.ProcessGroup | None = None) -> StageHook:
    """``stage`` as a hook ``(state, bucket) -> Future[Tensor]`` for code that calls ``ddp.register_comm_hook``.

    The hook ignores its state. A stage with memory serves one model.

    Args:
        stage: a reducer, or a chain with one.
        group: the process group of the model; the default one where ``None``.

    >>> ddp.register_comm_hook(None, as_hook(Quantize(Int8())))
    >>> loss_fn(ddp(x), y).backward()
    """
    if isinstance(stage, StageHook):
        raise ConfigurationError(f"{stage!r} is a hook already: ddp.register_comm_hook(state, hook)")
    made = as_stage(stage)
    return StageHook(lambda state: made, repr(made), group_of=lambda state: group)


class _Runtimes(weakref.WeakKeyDictionary["StageHook", Runtime]):
    """An attribute of a parameter: the runtime of each hook that its gradient has gone through.

    A hook under PyTorch's name lives as long as the process. A runtime refers to the parameters of its model, so none
    but they may keep it: then the garbage collector takes all of them. It is not pickled with a parameter.
    """

    def __reduce__(self) -> Any:
        return OrderedDict, ()


class StageHook:
    """A stage as a hook for ``ddp.register_comm_hook(state, hook)``; one object can serve several models.

    ``build`` makes the stage of a model from the hook's state, when the model's first bucket arrives; collectives then
    run on ``group_of(state)``, the default process group where that is ``None``. Registered this way, a stage does not
    know the model's own process group or the names of parameters, and it is not called before the forward, so gradients
    are not cleared for the user. :func:`overlap.register` does all of that. A global of ``module`` is pickled by its
    name.

    >>> isinstance(allreduce_hook, StageHook)
    True
    >>> allreduce_hook.stage()
    AllReduce()
    """

    def __init__(
        self,
        build: Callable[[Any], Stage],
        name: str,
        *,
        group_of: Callable[[Any], dist.ProcessGroup | None] = lambda state: None,
        doc: str | None = None,
        module: str | None = None,
    ) -> None:
        # The prefix: DDP refuses PyTorch's bf16 hooks on Gloo by their bare names.
        self.__name__ = self.__qualname__ = f"overlap.{name}"
        self.__doc__ = doc or StageHook.__doc__
        self._is_global = module is not None
        if module is not None:
            self.__module__ = module
        self._name = name
        self._build = build
        self.group_of = group_of
        """The process group that a state names, if it names one."""
        # DDP does not say which model a bucket belongs to; its parameters do.
        self._arriving: weakref.ref[Runtime] | None = None

    def stage(self, state: Any = None) -> Stage:
        """This hook with ``state`` as a new stage."""
        return self._build(state)

    # Without annotations: DDP compares them with its own types, and here they would be strings.
    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        if not bucket.is_last() and in_end_of_backward():
            # DDP's first backward with a static graph has all its buckets there, each with the number 0.
            raise UnsupportedError(f"{self!r}: the model has parameters of several dtypes: {NO_LAST_BUCKET}")
        parameters = bucket.parameters()
        runtime = getattr(parameters[0], _RUNTIMES, {}).get(self)
        if runtime is None:
            arriving = None if self._arriving is None else self._arriving()
            runtime = self._runtime(state, bucket) if bucket.index() == 0 else arriving
            if runtime is None:
                raise RegistrationError(
                    f"{self!r}: bucket {bucket.index()} arrived, but bucket 0 of its model never did"
                )
            for parameter in parameters:
                if not hasattr(parameter, _RUNTIMES):
                    setattr(parameter, _RUNTIMES, _Runtimes())
                getattr(parameter, _RUNTIMES)[self] = runtime
        self._arriving = None if bucket.is_last() else weakref.ref(runtime)
        return runtime.on_bucket(bucket)

    def _runtime(self, state: Any, bucket: GradBucket) -> Runtime:
        group: Any = self.group_of(state) or dist.group.WORLD
        context = StageContext(group=group, device=bucket.buffer().device, names=None, finds_unused=None)
        return Runtime(self.stage(state), context)

    def __repr__(self) -> str:
        return f"<hook {self._name}>"

    def __reduce__(self) -> str:
        if not self._is_global:
            raise TypeError(f"{self!r} cannot be pickled: it belongs to one model; make it where it is registered")
        return self._name
