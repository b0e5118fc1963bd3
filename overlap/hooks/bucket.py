"""A bucket of gradients, as a stage sees it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.c10d import GradBucket, bucket_gradients
from overlap.errors import ConfigurationError
from overlap.join import gradient_divisor

BucketView = tuple[torch.Size, tuple[int, ...], int]
"""Size, stride and offset in a bucket's buffer."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Bucket:
    """One bucket of DDP's gradients. All have one dtype and one device.

    Stages change ``buffer`` (or the parameters) in place.

    >>> def largest(bucket):
    ...     print(bucket.index, bucket.is_last, bucket.buffer.shape, bucket.names)
    >>> chain(AllReduce(), largest).register(ddp)
    <chain(AllReduce(), largest) registered>
    >>> loss_fn(ddp(x), y).backward()
    0 True torch.Size([58]) ('0.weight', '0.bias', '2.weight', '2.bias')
    """

    index: int
    """Position in the backward pass: 0 is the first bucket."""
    is_last: bool
    """Whether this is the last bucket of the backward pass; always ``False`` under FSDP, which does not tell."""
    buffer: Tensor
    """Flat gradients, shape ``(numel,)``: at first this rank's own, after the reducer the mean over ranks."""
    parameters: tuple[Tensor, ...]
    """The parameters whose gradients ``buffer`` holds, in its order."""
    group: dist.ProcessGroup
    """The process group that the model trains on; the default group of a stage's collectives."""
    divisor: int
    """The sum of gradients over ``group``, divided by this, is their mean. It is 1 behind ``DivideByCount``, which has
    divided, and where FSDP divides the sum by itself."""
    step: int
    """Number of backward passes before this one."""
    is_replay: bool = False
    """Whether this rank has run out of inputs and takes part outside of any backward: with zeros, or once with the
    gradients accumulated under ``no_sync``."""
    is_mean: bool = False
    """Whether ``buffer`` holds the mean over ranks; else it holds this rank's own gradients, and in a replay zeros."""
    owned: tuple[Tensor | None, ...] | None = None
    """After a reduce-scatter: flat views of ``buffer``, one for each of ``parameters`` and empty for some, which hold
    the mean on this rank; the other ranks have the rest. ``None`` in place of a view: all ranks have the whole mean of
    that parameter. ``None`` in place of all: of all parameters."""
    raw: GradBucket | None = None
    """DDP's own object, for stages that pass it to a hook; ``None`` where the buffer is not DDP's."""
    fqns: tuple[str, ...] | None = None
    """Returned by ``names``; ``None`` where they are not known."""
    views: tuple[BucketView, ...] | None = None
    """Where the buffer is not DDP's: ``layout``."""

    @cached_property
    def gradients(self) -> tuple[Tensor, ...]:
        """Views of ``buffer``, one for each of ``parameters``, with its shape and strides."""
        if self.raw is not None:
            return tuple(bucket_gradients(self.raw))
        start = int(self.buffer.storage_offset())
        return tuple(self.buffer.as_strided(size, stride, start + offset) for size, stride, offset in self.layout)

    @cached_property
    def layout(self) -> tuple[BucketView, ...]:
        """Size, stride and offset in ``buffer`` of each of ``gradients``, in real numbers: those of complex parameters
        have a last dimension of 2, as in DDP's buffer."""
        if self.views is not None:
            return self.views
        start = int(self.buffer.storage_offset())
        real = (torch.view_as_real(view) if view.is_complex() else view for view in self.gradients)
        return tuple((view.size(), view.stride(), int(view.storage_offset()) - start) for view in real)

    @property
    def names(self) -> tuple[str, ...]:
        """Fully qualified names of ``parameters`` in the wrapped module; use them as keys of a stage's memory.

        Raises:
            ConfigurationError: the stage was registered with ``ddp.register_comm_hook``, which does not tell names.
        """
        if self.fqns is None:
            raise ConfigurationError(
                "names of parameters are not known to a hook registered with ddp.register_comm_hook; "
                "register it with overlap.register(ddp, hook) instead"
            )
        return self.fqns

    def with_buffer(self, buffer: Tensor) -> Bucket:
        """The same bucket with another flat tensor of ``numel`` elements, for a stage that wraps a reducer.

        Its ``gradients`` are real; those of complex parameters have a last dimension of 2, as in DDP's buffer.
        """
        return replace(self, buffer=buffer, raw=None, views=self.layout)

    def with_mean(self) -> Bucket:
        """The same bucket when a reducer has made the mean of it."""
        return self.with_changes(is_mean=True)

    def with_changes(self, **changes: object) -> Bucket:
        """The same bucket with other facts, which its views do not depend on."""
        changed = object.__new__(type(self))
        changed.__dict__.update(self.__dict__, **changes)  # The views that were made, too.
        return changed

    def describe(self) -> str:
        """The bucket in error messages: index, step and the names (or the number) of its parameters."""
        what = _shortened(self.fqns) if self.fqns else f"{len(self.parameters)} parameters"
        return f"bucket {self.index}, step {self.step} ({what})"

    def __repr__(self) -> str:
        return f"Bucket({self.describe()}, {self.buffer.numel()} x {self.buffer.dtype})"


def renew(buckets: Iterable[Bucket], step: int) -> None:
    """Called by the engine, which keeps buckets with their plans: DDP's buffer has the gradients of another pass.
    Nothing else of a bucket changes."""
    for bucket in buckets:
        bucket.__dict__["step"] = step


def on_group(bucket: Bucket, group: dist.ProcessGroup) -> Bucket:
    """``bucket`` for a reducer whose mean is over ``group``."""
    return replace(bucket, group=group, divisor=gradient_divisor(group, within=bucket.group))


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, ..., {names[-1]}: {len(names)} parameters"
