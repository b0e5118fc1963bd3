"""Chunks of numbers on a grid; each chunk has one scale.

The scheme of QSGD (Alistarh et al., 2017), with a chunk's largest magnitude in place of its norm: a value ``x`` of a
chunk whose largest magnitude is ``peak`` becomes the number of the grid nearest to ``x * top / peak``, in ``-top ..
top``, and is decoded as ``number * step``, where ``step`` is ``peak / top`` in fp32. Numbers of the grid times a step,
zero among them, are decoded exactly; the largest values and constant chunks up to fp32's last place. If a chunk holds a
value that is not finite, none of its decoded values is finite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap._checks import told
from overlap.errors import ConfigurationError
from overlap.hooks.wires.blocks import BlockCodec, Field
from overlap.hooks.wires.wire import RoundingWire

__all__ = ["ChunkCodec", "ChunkWire", "Grid", "check_chunk", "cut"]

# Chunks are multiples of it, in values: in 4 bits its halves share bytes.
_MULTIPLE = 8


class Grid(ABC):
    """The numbers that are sent in place of a chunk's values, in steps of the chunk."""

    bits: int
    """Of a number."""
    top: float
    """The largest; a chunk's largest magnitude is sent as it."""

    @abstractmethod
    def write(self, values: Tensor, payload: Tensor, generator: torch.Generator | None) -> None:
        """Write ``values``, shape ``(..., chunk_numel)``, rounded, to ``payload``, int8 of shape ``(..., bytes)``.

        ``values`` may be overwritten. At most ``top`` in magnitude, or not finite, and then anything may be written.
        """

    @abstractmethod
    def read(self, payload: Tensor, out: Tensor) -> None:
        """Write the numbers that ``payload`` holds to ``out``, fp32 of shape ``(..., chunk_numel)``."""


def check_chunk(chunk: object, *, largest: int | None = None) -> None:
    """Raises: ConfigurationError: ``chunk`` is not a positive multiple of 8, at most ``largest``."""
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk <= 0 or chunk % _MULTIPLE:
        raise ConfigurationError(f"chunk is {told(chunk)}: give a positive multiple of {_MULTIPLE}, such as 512")
    if largest is not None and chunk > largest:
        raise ConfigurationError(f"chunk is {told(chunk)}: give at most {largest}")


def cut(numel: int, chunk: int) -> tuple[int, int]:
    """Into how many chunks of equal size to cut ``numel`` values, and their size, at most ``chunk``.

    >>> cut(1000, 512)
    (2, 504)
    """
    chunks = -(-numel // chunk)
    return chunks, -(-numel // (chunks * _MULTIPLE)) * _MULTIPLE if chunks else _MULTIPLE


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
class ChunkCodec(BlockCodec):
    """A message holds the step of each chunk in fp32, then the chunks' numbers."""

    grid: Grid
    chunks: int
    chunk_numel: int

    @property
    def fields(self) -> tuple[Field, ...]:
        return Field(torch.float32, 1), Field(torch.int8, self.chunk_numel * self.grid.bits // 8)

    def write(self, values: Tensor, fields: tuple[Tensor, ...], generator: torch.Generator | None) -> None:
        step, payload = fields
        top = self.grid.top
        scratch = values.abs()
        peak = scratch.amax(dim=-1, keepdim=True)
        # Divided by a tensor: by a number, some devices multiply by its inverse, which rounds twice.
        torch.div(peak, peak.new_full((), top), out=step)
        # If the step were rounded up, the largest numbers would be decoded as infinity.
        step.copy_(torch.where(step * top > peak, step.nextafter(torch.zeros_like(step)), step))
        # A peak of zero, or of a denormal number, must not give an infinite factor.
        steps = (top / peak).clamp_(max=torch.finfo(torch.float32).max)
        self.grid.write(torch.mul(values, steps, out=scratch), payload, generator)

    def read(self, fields: tuple[Tensor, ...], out: Tensor) -> None:
        step, payload = fields
        self.grid.read(payload, out)
        out.mul_(step)
