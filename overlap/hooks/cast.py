"""Gradients sent in another dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from overlap._checks import told
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks.adapters import to_stage
from overlap.hooks.allreduce import AllReduce
from overlap.hooks.bucket import Bucket
from overlap.hooks.bypass import bypass_from
from overlap.hooks.stage import Role, Stage, redistributed
from overlap.hooks.wires import Wire
from overlap.hooks.wires.floats import CastWire, cast

__all__ = ["Cast"]


class Cast(Stage):
    """Runs another reducer on the bucket in ``dtype``: half the bytes of fp32 for ``float16`` and ``bfloat16``.

    The cast rounds to nearest. ``float16`` turns values above 65,504 into ``inf``; ``bfloat16`` has the range of fp32
    and 8 bits of precision. A bucket that is already in ``dtype`` is not copied.

    Args:
        dtype: a real floating-point dtype, or :class:`Float16` or :class:`BFloat16` for theirs.
        inner: the reducer, ``AllReduce()`` by default; may be another ``Cast``.
        bypass: ``"auto"`` measures in the third pass whether the cast saves a fifth of the time of reducing a bucket,
            and if not leaves it out from then on; with ``AllReduce()`` as ``inner``.

    Issues: what ``inner`` issues, in ``dtype``. Changes: ``bucket.buffer``. Memory: one bucket in ``dtype``.

    Raises:
        ConfigurationError: ``dtype`` is not a real floating-point dtype nor a wire of one that rounds to nearest, or
            ``inner`` is not a reducer, or not ``AllReduce()`` although there is a ``bypass``.
        UnsupportedError: a bucket of complex gradients, in ``backward()``.

    >>> Cast(torch.bfloat16, AllReduce())
    Cast(bfloat16, AllReduce())
    """

    def __init__(
        self, dtype: torch.dtype | Wire, inner: Stage | None = None, *, bypass: Literal["auto"] | None = None
    ) -> None:
        self.dtype = _dtype(dtype)
        self.inner = AllReduce() if inner is None else to_stage(inner)
        if self.inner.role is not Role.REDUCER:
            raise ConfigurationError(f"Cast wraps a reducer such as AllReduce(), got {self.inner!r}")
        self._bypass = bypass_from(bypass, "Cast", compress=self._reduce)
        if self._bypass is not None and type(self.inner) is not AllReduce:
            raise ConfigurationError(
                f'bypass="auto" chooses between a cast and AllReduce(), but this is a cast for {self.inner!r}: leave '
                "the option out, or give it to the reducer inside"
            )

    @property
    def children(self) -> tuple[Stage, ...]:
        return (self.inner,) if self._bypass is None else (self.inner, self._bypass)

    @property
    def signature(self) -> str:
        bypass = "" if self._bypass is None else f", {self._bypass.signature}"
        return f"Cast({self.dtype}, {self.inner.signature}{bypass})"

    async def __call__(self, bucket: Bucket) -> None:
        await (self._reduce(bucket) if self._bypass is None else self._bypass(bucket))

    async def _reduce(self, bucket: Bucket) -> None:
        if bucket.buffer.dtype == self.dtype:
            await self.inner(bucket)
            return
        if not bucket.buffer.is_floating_point():
            raise UnsupportedError(f"{self!r} cannot keep {bucket.buffer.dtype} gradients; leave the cast out")
        compressed = bucket.with_buffer(cast(bucket.buffer, torch.empty_like(bucket.buffer, dtype=self.dtype)))
        await self.inner(compressed)
        bucket.buffer.copy_(compressed.buffer)

    def state_dict(self) -> dict[str, Any]:
        """What ``inner`` remembers; with a ``bypass``, what was decided."""
        return self.inner.state_dict() if self._bypass is None else self._bypass.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        (self.inner if self._bypass is None else self._bypass).load_state_dict(state_dict)

    def redistribute(self, states: Sequence[Mapping[str, Any]], *, rank: int, ranks: int) -> dict[str, Any]:
        """That of ``inner``; what a ``bypass`` has decided stays."""
        if self._bypass is None:
            return redistributed(self.inner, states, rank=rank, ranks=ranks)
        return super().redistribute(states, rank=rank, ranks=ranks)

    def __repr__(self) -> str:
        bypass = "" if self._bypass is None else f", {self._bypass!r}"
        return f"Cast({str(self.dtype).removeprefix('torch.')}, {self.inner!r}{bypass})"


def _dtype(dtype: object) -> torch.dtype:
    if isinstance(dtype, CastWire) and not dtype.is_stochastic:
        return dtype.dtype
    if isinstance(dtype, Wire):
        raise ConfigurationError(
            f"Cast sums in a floating-point dtype and rounds to nearest, got {dtype!r}: use Quantize({dtype!r}), which "
            "sums in fp32"
        )
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigurationError(f"Cast needs a floating-point torch.dtype such as torch.bfloat16, got {told(dtype)}")
    return dtype
