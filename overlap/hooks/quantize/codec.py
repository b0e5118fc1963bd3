"""Chunks of numbers as small integers with one scale each.

The scheme of QSGD (Alistarh et al., 2017), with the largest magnitude of a chunk as its scale: a value ``x`` of a
chunk whose largest magnitude is ``peak`` becomes the integer next to ``x * top / peak``, in ``-top .. top``, and
comes back as ``integer * peak / top``. Zero, the largest values and a constant chunk come back exactly; others are
off by half a step ``peak / top`` at most (a whole one, where rounding is stochastic). A chunk that holds a value that
is not finite comes back with none that is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap.errors import ConfigurationError

__all__ = ["ALIGNMENT", "BITS", "ChunkCodec", "Rounding", "StochasticRounding", "nearest"]

BITS = (4, 8)
# Of chunks, in values: halves of a chunk pair up in 4 bits, and scales stay aligned behind any payload.
ALIGNMENT = 8
_SCALE_BYTES = 4
# Values at a time on a CPU: what lies between two passes over them stays in the cache.
_BLOCK_NUMEL = 128 * 1024

Rounding = Callable[[Tensor, int], Tensor]
"""Rounds a tensor of magnitudes up to the second argument to integers, in place."""


def nearest(values: Tensor, top: int) -> Tensor:
    """To the nearest integer, ties to even."""
    return values.round_()


class StochasticRounding:
    """Up or down with the probability that makes the mean right, so that errors of many steps cancel out.

    Draws from a generator of its own, not from the global one that the model's dropout uses.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, values: Tensor, top: int) -> Tensor:
        noise = torch.empty_like(values).uniform_(generator=self.generator)
        # top + noise can round up to top + 1 in fp32.
        return values.add_(noise).floor_().clamp_(max=top)


@dataclass(frozen=True)
class ChunkCodec:
    """How ``numel`` values become one message of bytes, and come back.

    A message holds the scale of each chunk in fp32, then the chunks' integers; in 4 bits each byte holds a value of the
    first and one of the second half of its chunk.
    """

    bits: int
    chunks: int
    chunk_numel: int

    @classmethod
    def fit(cls, numel: int, *, bits: int, chunk: int) -> ChunkCodec:
        """The codec for at least ``numel`` values, in even chunks of at most ``chunk``.

        Raises:
            ConfigurationError: ``bits`` is not 4 or 8, or ``chunk`` no positive multiple of 8.

        >>> ChunkCodec.fit(1000, bits=8, chunk=512)
        ChunkCodec(bits=8, chunks=2, chunk_numel=504)
        """
        if bits not in BITS:
            raise ConfigurationError(f"bits is {bits!r}: give {' or '.join(map(str, BITS))}")
        if not isinstance(chunk, int) or chunk <= 0 or chunk % ALIGNMENT:
            raise ConfigurationError(f"chunk is {chunk!r}: give a positive multiple of {ALIGNMENT}, such as 512")
        chunks = math.ceil(numel / chunk)
        chunk_numel = math.ceil(numel / (chunks * ALIGNMENT)) * ALIGNMENT if chunks else ALIGNMENT
        return cls(bits, chunks, chunk_numel)

    @property
    def numel(self) -> int:
        """Values that a message holds, padding included."""
        return self.chunks * self.chunk_numel

    @property
    def message_bytes(self) -> int:
        return self.chunks * _SCALE_BYTES + self.numel * self.bits // 8

    @property
    def top(self) -> int:
        """The largest integer, which stands for a chunk's largest magnitude."""
        return int(2 ** (self.bits - 1) - 1)

    def encode(self, values: Tensor, message: Tensor, rounding: Rounding = nearest) -> None:
        """Write ``values``, fp32 of shape ``(numel,)``, into ``message``, uint8 of shape ``(message_bytes,)``."""
        for chunk_values, scale, payload in self._blocks(values, message):
            torch.amax(chunk_values.abs(), dim=1, keepdim=True, out=scale)
            # A peak of zero, or one that is hardly more, must not make infinitely many steps.
            steps = (self.top / scale).clamp_(max=torch.finfo(torch.float32).max)
            integers = rounding(chunk_values * steps, self.top).to(torch.int8)
            if self.bits == 8:
                payload.copy_(integers)
            else:
                low, high = integers.chunk(2, dim=1)
                torch.bitwise_or(low & 15, high << 4, out=payload)

    def decode(self, message: Tensor, out: Tensor, op: Callable[[Tensor, Tensor], Tensor] = Tensor.copy_) -> None:
        """Do ``op`` to ``out``, fp32 of shape ``(numel,)``, with the values that ``message`` holds."""
        for chunk_values, scale, payload in self._blocks(out, message):
            # In double, so that what comes back is rounded once: whole multiples of a step are exact.
            step = scale.double() / self.top
            if self.bits == 8:
                op(chunk_values, payload * step)
            else:
                low, high = chunk_values.chunk(2, dim=1)
                op(low, ((payload << 4) >> 4) * step)
                op(high, (payload >> 4) * step)

    def _blocks(self, values: Tensor, message: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views of some chunks at a time: values ``(n, chunk_numel)``, scales ``(n, 1)``, integers ``(n, bytes)``."""
        if self.chunks == 0:
            return
        scale_bytes = self.chunks * _SCALE_BYTES
        views = (
            values.view(self.chunks, self.chunk_numel),
            message[:scale_bytes].view(torch.float32).view(self.chunks, 1),
            message[scale_bytes:].view(torch.int8).view(self.chunks, -1),
        )
        rows = max(1, _BLOCK_NUMEL // self.chunk_numel) if values.device.type == "cpu" else self.chunks
        yield from zip(*(view.split(rows) for view in views), strict=True)
