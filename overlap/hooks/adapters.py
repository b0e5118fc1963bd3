"""Between stages and DDP's communication hooks, both ways."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from overlap._torch.c10d import GradBucket, is_future
from overlap.errors import ConfigurationError, RegistrationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import future_result
from overlap.hooks.engine.runtime import Runtime
from overlap.hooks.stage import Stage, StageContext, to_stage

__all__ = ["CommHook", "HookStage", "StageHook", "as_hook", "as_stage", "hook_name", "is_hook"]

BucketFuture = torch.futures.Future[torch.Tensor]


class CommHook(Protocol):
    """What ``ddp.register_comm_hook`` takes, under any names of its two parameters."""

    def __call__(self, state: Any, bucket: GradBucket, /) -> BucketFuture: ...


class HookStage(Stage):
    """A foreign hook as a reducer.

    The hook is called where DDP would call it, on autograd's thread when its bucket arrives, and runs its collectives
    on whatever group it chooses. One that chains collectives in callbacks keeps the risk that this has on Gloo.
    """

    def __init__(self, hook: CommHook, state: Any = None) -> None:
        self._hook = hook
        self._state = state

    @property
    def starts_on_autograd_thread(self) -> bool:
        return True

    async def __call__(self, bucket: Bucket) -> None:
        raw = bucket.raw if bucket.raw is not None else _Substitute(bucket)
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
    def signature(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        return f"as_stage({hook_name(self._hook)})"


class _Substitute:
    """Stands in for DDP's bucket when a wrapping stage has put another buffer in its place."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def index(self) -> int:
        return self._bucket.index

    def is_last(self) -> bool:
        return self._bucket.is_last

    def buffer(self) -> torch.Tensor:
        return self._bucket.buffer

    def gradients(self) -> list[torch.Tensor]:
        return list(self._bucket.gradients)

    def parameters(self) -> list[torch.Tensor]:
        return list(self._bucket.parameters)

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._bucket = self._bucket.with_buffer(buffer)


class StageHook:
    """A stage as a hook for ``ddp.register_comm_hook(state, hook)``; one object can serve several models.

    ``build`` makes the stage of a model from the hook's state, when the model's first bucket comes; collectives then
    run on ``group_of(state)``, the default process group where that is ``None``. Registered this way, a stage knows
    neither the model's own process group nor names of parameters, and gradients are not cleared for the user:
    :func:`overlap.register` knows and does all of it.
    """

    def __init__(
        self,
        build: Callable[[Any], Stage],
        name: str,
        *,
        group_of: Callable[[Any], dist.ProcessGroup | None] = lambda state: None,
        doc: str | None = None,
        pickled_as: tuple[Any, ...] | None = None,
    ) -> None:
        # With our own prefix: DDP refuses PyTorch's bf16 hooks on Gloo by their bare names.
        self.__name__ = self.__qualname__ = f"overlap.{name}"
        self._name = name
        self._pickled_as = pickled_as
        self.__doc__ = doc or StageHook.__doc__
        self._build = build
        self._group_of = group_of
        # Which runtime serves the model that a parameter belongs to; models are told apart by their parameters alone.
        self._runtimes: Any = WeakIdKeyDictionary()
        self._arriving: Runtime | None = None

    def stage(self, state: Any = None) -> Stage:
        """A new stage that does what this hook does with ``state``."""
        return self._build(state)

    def group_of(self, state: Any) -> dist.ProcessGroup | None:
        """The process group that ``state`` names, if it names one."""
        return self._group_of(state)

    # Without annotations: DDP compares them with its own types, and here they would be strings.
    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        parameters = bucket.parameters()
        runtime = self._runtimes.get(parameters[0])
        if runtime is None:
            runtime = self._runtime(state, bucket) if bucket.index() == 0 else self._arriving
            if runtime is None:
                raise RegistrationError(f"{self!r}: bucket {bucket.index()} of a model whose first never came")
        for parameter in parameters:
            self._runtimes[parameter] = runtime
        self._arriving = None if bucket.is_last() else runtime
        return runtime.on_bucket(bucket)

    def _runtime(self, state: Any, bucket: GradBucket) -> Runtime:
        group = self._group_of(state)
        context = StageContext(
            group=group if group is not None else dist.group.WORLD,  # type: ignore[arg-type]
            device=bucket.buffer().device,
            names=None,
            finds_unused=None,
        )
        return Runtime(self.stage(state), context)

    def __repr__(self) -> str:
        return f"<hook {self._name}>"

    def __reduce__(self) -> Any:
        if self._pickled_as is None:
            raise TypeError(f"{self!r} cannot be pickled: it belongs to one model; make it where it is registered")
        return self._pickled_as


def as_hook(stage: Stage | Callable[[Bucket], Any], *, group: dist.ProcessGroup | None = None) -> StageHook:
    """``stage`` as a hook ``(state, bucket) -> Future[Tensor]`` for whoever calls ``ddp.register_comm_hook``.

    The hook ignores its state. A stage with memory serves one model: give each model a hook of its own.

    Args:
        stage: what the hook does; it must contain a reducer.
        group: the process group of the model, the default one where ``None``.
    """
    made = to_stage(stage)
    return StageHook(lambda state: made, repr(made), group_of=lambda state: group)


def is_hook(thing: object) -> bool:
    """Whether ``thing`` looks like a communication hook: a callable that is no stage and no ``async`` function."""
    if isinstance(thing, StageHook):
        return True
    if isinstance(thing, (Stage, type)) or not callable(thing):
        return False
    return not (inspect.iscoroutinefunction(thing) or inspect.iscoroutinefunction(getattr(thing, "__call__", None)))  # noqa: B004


def as_stage(hook: CommHook | Callable[..., Any], state: Any = None) -> Stage:
    """The hook ``(state, bucket) -> Future[Tensor]`` as a reducer of a chain.

    Any callable of two arguments will do: functions, partials, lambdas, instances, under any argument names.

    Raises:
        ConfigurationError: ``hook`` cannot be called with a state and a bucket.
    """
    if isinstance(hook, StageHook):
        return hook.stage(state)
    if not callable(hook):
        raise ConfigurationError(f"{hook!r} is not callable; a hook is called with (state, bucket)")
    try:
        inspect.signature(hook).bind(state, None)
    except TypeError as error:
        raise ConfigurationError(f"the hook {hook_name(hook)} cannot be called with (state, bucket): {error}") from None
    except ValueError:
        pass  # A builtin tells no signature.
    return HookStage(hook, state)


def hook_name(hook: object) -> str:
    """What messages call ``hook``."""
    function = getattr(hook, "func", hook)  # functools.partial
    name: str = getattr(function, "__name__", None) or type(function).__name__
    return name.removeprefix("overlap.")
