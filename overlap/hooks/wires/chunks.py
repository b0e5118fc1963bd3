"""Chunks of numbers on a grid; each chunk has one scale.

The scheme of QSGD (Alistarh et al., 2017), with a chunk's largest magnitude in place of its norm: a value ``x`` of a
chunk whose largest magnitude is ``peak`` becomes the number of the grid nearest to ``x * top / peak``, in ``-top ..
top``, and is decoded as ``number * step``, where ``step`` is ``peak / top`` in fp32. Numbers of the grid times a step,
zero among them, are decoded exactly; the largest values and constant chunks up to fp32's last place. If a chunk holds a
value that is not finite, none of its decoded values is finite.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap.errors import ConfigurationError
from overlap.hooks.wires.wire import Codec, Combine, RoundingWire, aligned, at_a_time

__all__ = ["ChunkCodec", "ChunkWire", "Grid", "check_chunk", "cut"]

# Chunks are multiples of it, in values: in 4 bits its halves share bytes.
_MULTIPLE = 8
_STEP_BYTES = 4


class Grid(ABC):
    """The numbers that are sent in place of a chunk's values, in steps of the chunk."""

    bits: int
    """Of a number."""
    top: float
    """The largest; a chunk's largest magnitude is sent as it."""

    @abstractmethod
    def write(self, values: Tensor, payload: Tensor, generator: torch.Generator | None) -> None:
        """Write ``values``, shape ``(n, chunk_numel)``, rounded, to ``payload``, int8 of shape ``(n, bytes)``.

        ``values`` may be overwritten. At most ``top`` in magnitude, or not finite, and then anything may be written.
        """

    @abstractmethod
    def read(self, payload: Tensor, out: Tensor) -> None:
        """Write the numbers that ``payload`` holds to ``out``, fp32 of shape ``(n, chunk_numel)``."""


def check_chunk(chunk: object, *, largest: int | None = None) -> None:
    """Raises: ConfigurationError: ``chunk`` is not a positive multiple of 8, at most ``largest``."""
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk <= 0 or chunk % _MULTIPLE:
        raise ConfigurationError(f"chunk is {chunk!r}: give a positive multiple of {_MULTIPLE}, such as 512")
    if largest is not None and chunk > largest:
        raise ConfigurationError(f"chunk is {chunk}: give at most {largest}")


def cut(numel: int, chunk: int) -> tuple[int, int]:
    """Into how many chunks of equal size to cut ``numel`` values, and their size, at most ``chunk``.

    >>> cut(1000, 512)
    (2, 504)
    """
    chunks = math.ceil(numel / chunk)
    return chunks, math.ceil(numel / (chunks * _MULTIPLE)) * _MULTIPLE if chunks else _MULTIPLE


@dataclass(frozen=True, kw_only=True, repr=False)
class ChunkWire(RoundingWire):
    """Numbers of a grid, with an fp32 scale for each chunk of values."""

    chunk: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk)

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """What values are rounded to."""

    def codec(self, numel: int) -> ChunkCodec:
        return ChunkCodec(self.grid, *cut(numel, self.chunk))


@dataclass(frozen=True)
class ChunkCodec(Codec):
    """A message holds the step of each chunk in fp32, then the chunks' numbers."""

    grid: Grid
    chunks: int
    chunk_numel: int

    @property
    def numel(self) -> int:
        return self.chunks * self.chunk_numel

    @property
    def message_bytes(self) -> int:
        return aligned(self._step_bytes + self._payload_bytes)

    def encode(self, values: Tensor, message: Tensor, generator: torch.Generator | None = None) -> None:
        top = self.grid.top
        for chunk_values, step, payload in self._blocks(values, message):
            scratch = chunk_values.abs()
            peak = scratch.amax(dim=1, keepdim=True)
            torch.div(peak, top, out=step)
            # If the step were rounded up, the largest numbers would be decoded as infinity.
            step.copy_(torch.where(step * top > peak, step.nextafter(torch.zeros_like(step)), step))
            # A peak of zero, or of a denormal number, must not give an infinite factor.
            steps = (top / peak).clamp_(max=torch.finfo(torch.float32).max)
            self.grid.write(torch.mul(chunk_values, steps, out=scratch), payload, generator)

    def decode(self, message: Tensor, out: Tensor, combine: Combine | None = None) -> None:
        for chunk_values, step, payload in self._blocks(out, message):
            decoded = chunk_values if combine is None else torch.empty_like(chunk_values)
            self.grid.read(payload, decoded)
            decoded.mul_(step)
            if combine is not None:
                combine(chunk_values, decoded)

    @property
    def _step_bytes(self) -> int:
        return self.chunks * _STEP_BYTES

    @property
    def _payload_bytes(self) -> int:
        return self.numel * self.grid.bits // 8

    def _blocks(self, values: Tensor, message: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views of a few chunks at a time: values ``(n, chunk_numel)``, steps ``(n, 1)``, numbers ``(n, bytes)``."""
        if self.chunks == 0:
            return
        steps, payload, _padding = message.split(
            [self._step_bytes, self._payload_bytes, self.message_bytes - self._step_bytes - self._payload_bytes]
        )
        views = (
            values.view(self.chunks, self.chunk_numel),
            steps.view(torch.float32).view(self.chunks, 1),
            payload.view(torch.int8).view(self.chunks, -1),
        )
        rows = at_a_time(self.chunks, self.chunk_numel, values.device)
        yield from zip(*(view.split(rows) for view in views), strict=True)
