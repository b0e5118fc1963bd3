"""The view of DDP's gradient bucket that a stage works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.c10d import GradBucket, bucket_gradients
from overlap.errors import ConfigurationError

__all__ = ["Bucket"]


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Bucket:
    """One bucket of gradients, and all of DDP that a stage may touch.

    A bucket has one dtype and one device. Stages change ``buffer`` (or the parameters) in place.
    """

    index: int
    """Place in the order of arrival: 0 is the first bucket of a backward pass."""
    is_last: bool
    """Whether no bucket of this backward pass comes after this one."""
    buffer: Tensor
    """Flat gradients, shape ``(numel,)``: this rank's own on arrival, the mean over ranks after the reducer."""
    parameters: tuple[Tensor, ...]
    """The parameters whose gradients ``buffer`` holds, in its order."""
    group: dist.ProcessGroup
    """The process group that the model trains on; what a collective uses when it is given none."""
    divisor: int
    """The number that a sum of gradients over ``group`` is divided by to give their mean."""
    step: int
    """Backward passes that came before this one."""
    is_replay: bool = False
    """Whether this rank has run out of inputs and takes part with zeros, so the pass is no backward of its own."""
    is_mean: bool = False
    """Whether ``buffer`` holds the mean over ranks; else it holds this rank's own gradients, and in a replay zeros."""
    raw: GradBucket | None = field(default=None)
    """DDP's own object, for stages that hand it on to a hook; ``None`` where the buffer is not DDP's."""
    fqns: tuple[str, ...] | None = None
    views: tuple[tuple[torch.Size, tuple[int, ...], int], ...] | None = None

    @cached_property
    def gradients(self) -> tuple[Tensor, ...]:
        """Views of ``buffer``, one for each of ``parameters``, with its shape and strides."""
        if self.raw is not None:
            return tuple(bucket_gradients(self.raw))
        assert self.views is not None, "a bucket without DDP's object is made by with_buffer"
        return tuple(self.buffer.as_strided(size, stride, offset) for size, stride, offset in self.views)

    @property
    def names(self) -> tuple[str, ...]:
        """Fully qualified names of ``parameters`` in the wrapped module; what a stage keys its memory by.

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
        """The same bucket around another flat tensor of ``numel`` elements, for a stage that wraps a reducer.

        Its ``gradients`` are real, also those of complex parameters, with a last dimension of 2 as DDP's buffer has it.
        """
        start = int(self.buffer.storage_offset())
        real = (torch.view_as_real(view) if view.is_complex() else view for view in self.gradients)
        views = self.views or tuple((view.size(), view.stride(), int(view.storage_offset()) - start) for view in real)
        return replace(self, buffer=buffer, raw=None, views=views)

    def describe(self) -> str:
        """What an error message calls this bucket: index, step and the names (or the number) of its parameters."""
        what = _shortened(self.fqns) if self.fqns else f"{len(self.parameters)} parameters"
        return f"bucket {self.index}, step {self.step} ({what})"

    def __repr__(self) -> str:
        return f"Bucket({self.describe()}, {self.buffer.numel()} x {self.buffer.dtype})"


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, ..., {names[-1]}: {len(names)} parameters"
