"""What a stage learns about the model that it is registered with."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from overlap.hooks.collectives import Operation

if TYPE_CHECKING:
    from overlap.hooks.bucket import Bucket

__all__ = ["Background", "BucketWatcher", "StageContext"]


class BucketWatcher(Protocol):
    """Follows DDP's own buckets, other than those of a replay, whose memory is given up anyway."""

    def arrived(self, bucket: Bucket) -> Bucket:
        """All gradients of ``bucket`` are there; on the thread of backward. Returns the bucket that stages are given.
        When this returns for the last bucket, DDP may use the memory of all."""

    def through(self, bucket: Bucket) -> None:
        """Its last stage is done; on the thread that runs stages and, on accelerators, with their stream current.
        ``bucket`` is the object that arrived."""

    def over(self, *, failed: bool) -> None:
        """Backward is over and DDP has set ``.grad``; on the training thread, before stages are told."""


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
    """What a stage may know about the model before the first bucket arrives.

    It does not refer to the model itself: DDP's reducer owns the hook, so the cycle could never be collected.

    >>> class Described(Stage):
    ...     role = Role.TRANSFORM
    ...     def attach(self, context):
    ...         print(context.device, sorted(context.names.values()))
    ...     async def __call__(self, bucket):
    ...         pass
    >>> registration = chain(AllReduce(), Described()).register(ddp)
    cpu ['0.bias', '0.weight', '2.bias', '2.weight']
    """

    group: dist.ProcessGroup
    device: torch.device
    """Device of the model's parameters (of the first bucket, where only a hook is registered)."""
    names: Mapping[torch.Tensor, str] | None
    """Fully qualified name of each parameter that DDP reduces; ``None`` where only a hook is registered."""
    finds_unused: bool | None
    """Whether DDP accepts parameters without a gradient (``find_unused_parameters`` or ``static_graph``)."""
    module: weakref.ref[torch.nn.Module] | None = None
    """The wrapped module; ``None`` where only a hook is registered."""
    ddp: weakref.ref[DistributedDataParallel] | None = None
    """The model itself; ``None`` where only a hook is registered."""
    is_joining: Callable[[], bool] = lambda: False
    """Whether the model is inside of a ``Join``, overlap's or PyTorch's; not known where only a hook is registered."""
    tell: Callable[[BaseException], None] = lambda error: None
    """Tells the other ranks of an error in the training loop between two passes, for which this one may not go on."""
    note_unfinished: Callable[[], None] = lambda: None
    """Has DDP forget the backward that it has prepared, before the next forward: it ended with an error."""
    watch: Callable[[BucketWatcher], object] = lambda watcher: None
    """Has a :class:`BucketWatcher` be told of buckets from now on, until the registration is removed."""
    background: Background | None = None
    """Runs work outside of a backward pass, on the same connections and after all work begun before; never ``None`` in
    :meth:`Stage.attach`."""

    @property
    def model_in_words(self) -> str:
        """The same text on every rank, if the model's parameters are the same."""
        if self.names is None:
            return "a model"
        layout = [(name, tuple(parameter.shape), str(parameter.dtype)) for parameter, name in self.names.items()]
        digest = hashlib.sha256(repr(layout).encode()).hexdigest()[:8]
        return f"a model of {len(layout)} parameters (names, shapes and dtypes: {digest})"
