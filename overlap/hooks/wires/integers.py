"""Chunks of numbers as small integers; each chunk has one scale, the step between two integers.

The scheme of QSGD (Alistarh et al., 2017), with a chunk's largest magnitude in place of its norm: a value ``x`` of a
chunk whose largest magnitude is ``peak`` becomes the integer nearest to ``x * top / peak``, in ``-top .. top``, and is
decoded as ``integer * step``, where ``step`` is ``peak / top`` in fp32. Multiples of a step, zero among them, are
decoded exactly; the largest values and constant chunks up to fp32's last place; other values with an error of at most
half a step (a whole step with stochastic rounding). If a chunk holds a value that is not finite, none of its decoded
values is finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from overlap.errors import ConfigurationError
from overlap.hooks.wires.wire import Codec, Combine, Wire

__all__ = ["ChunkCodec", "Int4", "Int8"]

_BITS = (4, 8)
# Chunks are multiples of it, in values: in 4 bits its halves share bytes, and the next message stays aligned.
_ALIGNMENT = 8
_STEP_BYTES = 4
# Values at a time on a CPU, so that they stay in the cache between two passes over them.
_BLOCK_NUMEL = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class _Integers(Wire):
    chunk: int = 512
    rounding: Literal["nearest", "stochastic"] = "nearest"

    bits: ClassVar[int]

    def __post_init__(self) -> None:
        ChunkCodec.fit(1, bits=self.bits, chunk=self.chunk)
        if self.rounding not in ("nearest", "stochastic"):
            raise ConfigurationError(f"rounding is {self.rounding!r}: give 'nearest' or 'stochastic'")

    @property
    def is_stochastic(self) -> bool:
        return self.rounding == "stochastic"

    def codec(self, numel: int) -> ChunkCodec:
        return ChunkCodec.fit(numel, bits=self.bits, chunk=self.chunk)


class Int8(_Integers):
    """Integers of 8 bits with an fp32 scale for each chunk: 0.254 of fp32."""

    bits = 8


class Int4(_Integers):
    """Integers of 4 bits with an fp32 scale for each chunk: 0.127 of fp32."""

    bits = 4


def _rounded(values: Tensor, top: int, generator: torch.Generator | None) -> Tensor:
    """``values``, at most ``top`` in magnitude, as integers, in place: to nearest (ties to even), or up or down."""
    if generator is None:
        return values.round_()
    noise = torch.empty_like(values).uniform_(generator=generator)
    # top + noise can round up to top + 1 in fp32.
    return values.add_(noise).floor_().clamp_(max=top)


@dataclass(frozen=True)
class ChunkCodec(Codec):
    """Encodes ``numel`` values as one message of bytes, and decodes it.

    A message holds the step of each chunk in fp32, then the chunks' integers. In 4 bits each byte holds one value of
    the first half of its chunk and one of the second half.
    """

    bits: int
    chunks: int
    chunk_numel: int

    @classmethod
    def fit(cls, numel: int, *, bits: int, chunk: int) -> ChunkCodec:
        """The codec for at least ``numel`` values, in chunks of equal size, at most ``chunk``.

        Raises:
            ConfigurationError: ``bits`` is not 4 or 8, or ``chunk`` is not a positive multiple of 8.

        >>> ChunkCodec.fit(1000, bits=8, chunk=512)
        ChunkCodec(bits=8, chunks=2, chunk_numel=504)
        """
        if bits not in _BITS:
            raise ConfigurationError(f"bits is {bits!r}: give {' or '.join(map(str, _BITS))}")
        if not isinstance(chunk, int) or chunk <= 0 or chunk % _ALIGNMENT:
            raise ConfigurationError(f"chunk is {chunk!r}: give a positive multiple of {_ALIGNMENT}, such as 512")
        chunks = math.ceil(numel / chunk)
        chunk_numel = math.ceil(numel / (chunks * _ALIGNMENT)) * _ALIGNMENT if chunks else _ALIGNMENT
        return cls(bits, chunks, chunk_numel)

    @property
    def numel(self) -> int:
        """Values that a message holds, padding included."""
        return self.chunks * self.chunk_numel

    @property
    def message_bytes(self) -> int:
        return self.chunks * _STEP_BYTES + self.numel * self.bits // 8

    @property
    def top(self) -> int:
        """The largest integer; a chunk's largest magnitude is encoded as it."""
        return int(2 ** (self.bits - 1) - 1)

    def encode(self, values: Tensor, message: Tensor, generator: torch.Generator | None = None) -> None:
        for chunk_values, step, payload in self._blocks(values, message):
            scratch = chunk_values.abs()
            peak = scratch.amax(dim=1, keepdim=True)
            torch.div(peak, self.top, out=step)
            # If the step were rounded up, the largest numbers would be decoded as infinity.
            step.copy_(torch.where(step * self.top > peak, step.nextafter(torch.zeros_like(step)), step))
            # A peak of zero, or of a denormal number, must not give an infinite factor.
            steps = (self.top / peak).clamp_(max=torch.finfo(torch.float32).max)
            rounded = _rounded(torch.mul(chunk_values, steps, out=scratch), self.top, generator)
            if self.bits == 8:
                payload.copy_(rounded)
            else:
                low, high = rounded.to(torch.int8).chunk(2, dim=1)
                torch.bitwise_or(low.bitwise_and_(15), high.bitwise_left_shift_(4), out=payload)

    def decode(self, message: Tensor, out: Tensor, combine: Combine | None = None) -> None:
        for chunk_values, step, payload in self._blocks(out, message):
            decoded = chunk_values if combine is None else torch.empty_like(chunk_values)
            if self.bits == 8:
                decoded.copy_(payload)
            else:
                low, high = decoded.chunk(2, dim=1)
                low.copy_((payload << 4).bitwise_right_shift_(4))
                high.copy_(payload >> 4)
            decoded.mul_(step)
            if combine is not None:
                combine(chunk_values, decoded)

    def _blocks(self, values: Tensor, message: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views of a few chunks at a time: values ``(n, chunk_numel)``, steps ``(n, 1)``, integers ``(n, bytes)``."""
        if self.chunks == 0:
            return
        step_bytes = self.chunks * _STEP_BYTES
        views = (
            values.view(self.chunks, self.chunk_numel),
            message[:step_bytes].view(torch.float32).view(self.chunks, 1),
            message[step_bytes:].view(torch.int8).view(self.chunks, -1),
        )
        rows = max(1, _BLOCK_NUMEL // self.chunk_numel) if values.device.type == "cpu" else self.chunks
        yield from zip(*(view.split(rows) for view in views), strict=True)
