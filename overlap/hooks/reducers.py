"""Reducers that give the mean as it is, or rounded to another dtype."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._checks import short_repr
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks.adapters import as_stage
from overlap.hooks.bucket import Bucket, on_group
from overlap.hooks.collectives import Operation, all_reduce
from overlap.hooks.stage import Plan, Role, Stage, StageContext, planner
from overlap.hooks.wires import Wire


class AllReduce(Stage):
    """The mean of the gradients over ranks, by one all-reduce per bucket.

    Equal to plain DDP bit for bit at any number of ranks: as in DDP, each rank multiplies its gradient by
    ``1 / divisor`` first, so that a sum of half-precision gradients does not overflow.

    Communication: one all-reduce of ``(numel,)`` in the bucket's dtype. Changes: ``bucket.buffer``.

    >>> AllReduce()
    AllReduce()
    """

    def plan(self, bucket: Bucket) -> Plan:
        # NCCL's average divides the sum, which rounds otherwise than DDP, and overflows in half precision.
        scale_, factor = bucket.buffer.mul_, 1 / bucket.divisor
        reduction = all_reduce(bucket.buffer, group=bucket.group)

        def launch() -> Operation:
            scale_(factor)
            return reduction

        return (launch if bucket.divisor != 1 else lambda: reduction,)


class NoReduction(Stage):
    """Leaves each rank's own gradient as it is, to measure the cost of communication or to reduce by other means.

    >>> chain(NoReduction()).register(ddp)  # on several ranks each keeps its own gradients
    <chain(NoReduction()) registered>
    >>> loss_fn(ddp(x), y).backward()
    """

    async def __call__(self, bucket: Bucket) -> None:
        return


class Cast(Stage):
    """Runs another reducer on the bucket in ``dtype``: half the bytes of fp32 for ``float16`` and ``bfloat16``.

    The cast rounds to nearest. ``float16`` turns values above 65,504 into ``inf``; ``bfloat16`` has the range of fp32
    and 8 bits of precision. A bucket that is already in ``dtype`` is not copied.

    Args:
        dtype: a real floating-point dtype.
        inner: the reducer, ``AllReduce()`` by default; may be another ``Cast``.

    Communication: that of ``inner``, in ``dtype``. Changes: ``bucket.buffer``. Memory: one bucket in ``dtype``.

    Raises:
        ConfigurationError: ``dtype`` is not a real floating-point dtype, or ``inner`` is not a reducer.
        UnsupportedError: a bucket of complex gradients, in ``backward()``.

    >>> Cast(torch.bfloat16, AllReduce())
    Cast(bfloat16, AllReduce())
    """

    def __init__(self, dtype: torch.dtype, inner: Stage | None = None) -> None:
        self.dtype = _checked(dtype)
        self.inner = AllReduce() if inner is None else as_stage(inner)
        if self.inner.role is not Role.REDUCER:
            raise ConfigurationError(f"Cast wraps a reducer such as AllReduce(), got {self.inner!r}")
        self.children = (self.inner,)

    @property
    def signature(self) -> str:
        return f"Cast({self.dtype}, {self.inner.signature})"

    async def __call__(self, bucket: Bucket) -> None:
        if bucket.buffer.dtype == self.dtype:
            await self.inner(bucket)
            return
        if not bucket.buffer.is_floating_point():
            raise UnsupportedError(f"{self!r} cannot keep {bucket.buffer.dtype} gradients; leave the cast out")
        compressed = bucket.with_buffer(bucket.buffer.to(self.dtype))
        await self.inner(compressed)
        bucket.buffer.copy_(compressed.buffer)

    def plan(self, bucket: Bucket) -> Plan | None:
        buffer, dtype, factor, group = bucket.buffer, self.dtype, 1 / bucket.divisor, bucket.group
        if buffer.dtype == dtype:
            return planner(self.inner)(bucket)
        if not buffer.is_floating_point() or type(self.inner) is not AllReduce:
            return None
        compressed: Tensor | None = None  # Of one pass: kept, it would take half as much memory as the gradients.

        def launch() -> Operation:
            nonlocal compressed
            compressed = buffer.to(dtype).mul_(factor)
            return all_reduce(compressed, group=group)

        def finish() -> None:
            nonlocal compressed
            if compressed is not None:
                buffer.copy_(compressed)
            compressed = None

        return launch, finish

    def __repr__(self) -> str:
        return f"Cast({str(self.dtype).removeprefix('torch.')}, {self.inner!r})"


class OnGroup(Stage):
    """A reducer on the process group that a hook's state names, whatever the model's own group is."""

    def __init__(self, inner: Stage, group: dist.ProcessGroup) -> None:
        self.children = (inner,)
        self._group = group

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, inner: Stage) -> Stage:
        """``inner`` on ``group``; ``inner`` itself where that is ``None``."""
        return inner if group is None else cls(inner, group)

    def context_of(self, child: Stage, context: StageContext) -> StageContext:
        return replace(context, group=self._group)

    async def __call__(self, bucket: Bucket) -> None:
        await self.children[0](on_group(bucket, self._group))

    def __repr__(self) -> str:
        return f"{self.children[0]!r} on {self._group.size()} ranks"


def _checked(dtype: object) -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    remedy = f"; Quantize({dtype!r}) sends a wire" if isinstance(dtype, Wire) else ""
    raise ConfigurationError(
        f"Cast needs a floating-point torch.dtype such as torch.bfloat16, got {short_repr(dtype)}{remedy}"
    )
