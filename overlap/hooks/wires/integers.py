"""Integers of 8 or 4 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from overlap.hooks.wires.chunks import ChunkWire, Grid
from overlap.hooks.wires.noise import add_noise_

__all__ = ["Int4", "Int8"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Int8(ChunkWire):
    """Integers of 8 bits with an fp32 scale for each chunk: 0.252 of fp32.

    A value is off by at most half a step, 1/127 of its chunk's largest magnitude; by a whole step with stochastic
    rounding. If a chunk holds a value that is not finite, none of its decoded values is finite.

    Args:
        chunk: how many values share a scale at most; a multiple of 8.
        rounding: ``"nearest"``, or ``"stochastic"``, whose error is zero on average.

    Raises:
        ConfigurationError: an argument is not one of the above.

    >>> Int8(chunk=128)
    Int8(chunk=128)
    """

    @property
    def grid(self) -> Grid:
        return _EightBits()


@dataclass(frozen=True, kw_only=True, repr=False)
class Int4(ChunkWire):
    """Integers of 4 bits with an fp32 scale for each chunk: 0.127 of fp32.

    A value is off by at most half a step, 1/7 of its chunk's largest magnitude; by a whole step with stochastic
    rounding. If a chunk holds a value that is not finite, none of its decoded values is finite.

    Args:
        chunk: how many values share a scale at most; a multiple of 8.
        rounding: ``"nearest"``, or ``"stochastic"``, whose error is zero on average.

    Raises:
        ConfigurationError: an argument is not one of the above.

    >>> Int4(rounding="stochastic")
    Int4(rounding='stochastic')
    """

    @property
    def grid(self) -> Grid:
        return _FourBits()


@dataclass(frozen=True)
class _EightBits(Grid):
    bits = 8
    top = 127

    def write(self, values: Tensor, payload: Tensor, generator: torch.Generator | None) -> None:
        payload.copy_(_rounded(values, self.top, generator))

    def read(self, payload: Tensor, out: Tensor) -> None:
        out.copy_(payload)


@dataclass(frozen=True)
class _FourBits(Grid):
    bits = 4
    top = 7

    def write(self, values: Tensor, payload: Tensor, generator: torch.Generator | None) -> None:
        low, high = _rounded(values, self.top, generator).to(torch.int8).chunk(2, dim=-1)
        torch.bitwise_or(low.bitwise_and_(15), high.bitwise_left_shift_(4), out=payload)

    def read(self, payload: Tensor, out: Tensor) -> None:
        low, high = out.chunk(2, dim=-1)
        low.copy_((payload << 4).bitwise_right_shift_(4))
        high.copy_(payload >> 4)


def _rounded(values: Tensor, top: float, generator: torch.Generator | None) -> Tensor:
    """``values``, at most ``top`` in magnitude, as integers, in place: to nearest (ties to even), or up or down."""
    if generator is None:
        return values.round_()
    return add_noise_(values, generator).round_().clamp_(-top, top)
