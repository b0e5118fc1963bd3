"""What a stage is."""

from __future__ import annotations

import enum
import hashlib
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist

from overlap.errors import ConfigurationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Operation

__all__ = ["Role", "StageContext", "Stage", "to_stage", "walk"]


class Role(enum.IntEnum):
    """What a stage does to a bucket; a chain's stages come in this order."""

    REDUCER = 1  # local gradient -> mean over ranks
    UPDATE = 2  # mean -> new parameters
    AVERAGER = 3  # parameters -> their mean over ranks


class Background(Protocol):
    """Runs ``work`` on each of ``items`` outside of a backward pass; see :mod:`overlap.hooks.engine.background`."""

    def __call__(
        self,
        items: Sequence[Any],
        work: Callable[[Any], Coroutine[Operation, Any, None]],
        *,
        on_failure: Callable[[BaseException], None],
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """Where a stage is registered: what it may know of the model before the first bucket comes.

    It holds no reference to the model: DDP's reducer owns the hook, so the cycle could never be collected.
    """

    group: dist.ProcessGroup
    device: torch.device
    """Device of the model's parameters (of the first bucket, where only a hook is registered)."""
    names: Mapping[torch.Tensor, str] | None
    """Fully qualified name of each parameter that DDP reduces; ``None`` where only a hook is registered."""
    finds_unused: bool | None
    """Whether DDP tolerates parameters without a gradient (``find_unused_parameters`` or ``static_graph``)."""
    module: weakref.ref[torch.nn.Module] | None = None
    """The wrapped module; ``None`` where only a hook is registered."""
    background: Background | None = None
    """Runs work outside of a backward pass, over the same connections and behind all that was begun before; always
    there when a stage is attached."""

    def describe(self) -> str:
        """The model in words that are the same on every rank, if its parameters are."""
        if self.names is None:
            return "a model"
        layout = [(name, tuple(parameter.shape), str(parameter.dtype)) for parameter, name in self.names.items()]
        digest = hashlib.sha256(repr(layout).encode()).hexdigest()[:8]
        return f"a model of {len(layout)} parameters (names, shapes and dtypes: {digest})"


class Stage(ABC):
    """A step on a bucket's way: straight-line code that changes the bucket in place and awaits collectives.

    ::

        class Mean(Stage):
            async def __call__(self, bucket):
                await all_reduce(bucket.buffer, group=bucket.group)
                bucket.buffer.div_(bucket.divisor)

    Stages of one backward pass are coroutines that a scheduler drives in an order that is the same on every rank, so
    a stage never launches a collective from a callback, and between two ``await`` no other stage runs. A stage is
    called for every bucket of every backward pass, in buckets' order, also on a rank that has run out of inputs and
    replays with zeros. It must issue the same collectives on every rank.
    """

    role: Role = Role.REDUCER

    @abstractmethod
    async def __call__(self, bucket: Bucket) -> None:
        """Change ``bucket.buffer`` or its parameters in place."""

    @property
    def children(self) -> tuple[Stage, ...]:
        """The stages that this one is made of."""
        return ()

    @property
    def sequence(self) -> tuple[Stage, ...]:
        """The stages that a bucket goes through in turn: this one, or those of a chain."""
        return (self,)

    def passed(self, bucket: Bucket) -> Bucket:
        """``bucket`` as the next stage of the chain sees it."""
        return replace(bucket, is_mean=True) if self.role is Role.REDUCER else bucket

    @property
    def starts_on_autograd_thread(self) -> bool:
        """Whether the code before the first ``await`` must run where DDP calls hooks, at the bucket's arrival."""
        return any(child.starts_on_autograd_thread for child in self.children)

    @property
    def signature(self) -> str:
        """What every rank must run alike, in words: compared between ranks at registration, so without addresses."""
        return f"{type(self).__name__}({', '.join(child.signature for child in self.children)})"

    @property
    def reduces(self) -> bool:
        """Whether the stage takes this rank's own gradients; an update that reduces by itself says so too."""
        return self.role is Role.REDUCER

    # What follows is empty on purpose: most stages have nothing to say there.

    def attach(self, context: StageContext) -> None:  # noqa: B027
        """Called once, when the stage is registered, before anything else; the place to refuse a model."""

    def detach(self) -> None:  # noqa: B027
        """Called when the registration is removed."""

    def before_forward(self) -> None:  # noqa: B027
        """Called before each forward of the model that records gradients."""

    def before_backward(self, *, is_replay: bool) -> None:  # noqa: B027
        """Called on the training thread when the first bucket of a pass arrives, before any collective of the pass."""

    def after_backward(self, *, failed: bool) -> str | None:
        """Called on the training thread when all buckets of a pass are through and DDP has set ``.grad``.

        ``failed`` says that a stage raised, so that buckets may not have come all the way; ``backward`` raises next,
        with what this returns as a note.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values by name: what the stage remembers between steps on this rank."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave.

        Raises:
            ConfigurationError: the stage has no memory and ``state_dict`` is not empty.
        """
        if state_dict:
            raise ConfigurationError(f"{self!r} has no state to load, but was given {sorted(state_dict)}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class _Function(Stage):
    """A plain ``async`` callable as a stage."""

    def __init__(self, function: Callable[[Bucket], Awaitable[None]]) -> None:
        self._function = function
        self.role = Role(getattr(function, "role", Role.REDUCER))

    async def __call__(self, bucket: Bucket) -> None:
        await self._function(bucket)

    @property
    def signature(self) -> str:
        return getattr(self._function, "__name__", None) or type(self._function).__name__

    def __repr__(self) -> str:
        return self.signature


def to_stage(thing: object) -> Stage:
    """``thing`` as a stage: a stage as it is, an ``async`` callable of a bucket wrapped.

    Raises:
        ConfigurationError: ``thing`` is neither.
    """
    if isinstance(thing, Stage):
        return thing
    if isinstance(thing, type):
        raise ConfigurationError(f"{thing.__name__} is a class; a chain takes stages: {thing.__name__}(...)")
    call = thing if inspect.isfunction(thing) else getattr(thing, "__call__", None)  # noqa: B004
    if inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(thing):
        return _Function(thing)  # type: ignore[arg-type]
    raise ConfigurationError(
        f"{thing!r} is no stage: a stage is an overlap.Stage or an `async` callable of one bucket; "
        "a DDP communication hook becomes one with overlap.hooks.as_stage(hook, state)"
    )


def walk(stage: Stage) -> Iterator[Stage]:
    """``stage`` and all that it is made of."""
    yield stage
    for child in stage.children:
        yield from walk(child)
