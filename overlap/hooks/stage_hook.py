"""A stage as a DDP communication hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from overlap._torch.autograd import in_end_of_backward
from overlap._torch.c10d import GradBucket
from overlap.errors import RegistrationError, UnsupportedError
from overlap.hooks.context import StageContext
from overlap.hooks.engine.runtime import NO_LAST_BUCKET, Runtime
from overlap.hooks.stage import Stage

__all__ = ["StageHook"]


class StageHook:
    """A stage as a hook for ``ddp.register_comm_hook(state, hook)``; one object can serve several models.

    ``build`` makes the stage of a model from the hook's state, when the model's first bucket arrives; collectives then
    run on ``group_of(state)``, the default process group where that is ``None``. Registered this way, a stage does not
    know the model's own process group or the names of parameters, and it is not called before the forward, so gradients
    are not cleared for the user. :func:`overlap.register` does all of that.

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
        pickled_as: tuple[Any, ...] | None = None,
    ) -> None:
        # The prefix: DDP refuses PyTorch's bf16 hooks on Gloo by their bare names.
        self.__name__ = self.__qualname__ = f"overlap.{name}"
        self.__doc__ = doc or StageHook.__doc__
        if module is not None:  # The hook is a global of it, and pickled by its name.
            self.__module__ = module
        self._pickled_as = pickled_as if module is None else name
        self._name = name
        self._build = build
        self.group_of = group_of
        """The process group that a state names, if it names one."""
        # A hook is not told which model a bucket belongs to; its parameters tell.
        self._runtimes: Any = WeakIdKeyDictionary()
        self._arriving: Runtime | None = None

    def stage(self, state: Any = None) -> Stage:
        """A new stage that does what this hook does with ``state``."""
        return self._build(state)

    # Without annotations: DDP compares them with its own types, and here they would be strings.
    def __call__(self, state, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        if not bucket.is_last() and in_end_of_backward():
            # DDP's first backward with a static graph has all its buckets there, each with the number 0.
            raise UnsupportedError(f"{self!r}: the model has parameters of several dtypes: {NO_LAST_BUCKET}")
        parameters = bucket.parameters()
        runtime = self._runtimes.get(parameters[0])
        if runtime is None:
            runtime = self._runtime(state, bucket) if bucket.index() == 0 else self._arriving
            if runtime is None:
                raise RegistrationError(f"{self!r}: bucket {bucket.index()} came, but bucket 0 of its model never did")
        for parameter in parameters:
            self._runtimes[parameter] = runtime
        self._arriving = None if bucket.is_last() else runtime
        return runtime.on_bucket(bucket)

    def _runtime(self, state: Any, bucket: GradBucket) -> Runtime:
        group = self.group_of(state)
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
