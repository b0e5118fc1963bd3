"""Floating-point numbers of 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from overlap.hooks.wires.chunks import ChunkWire, Grid
from overlap.hooks.wires.floats import cast

__all__ = ["Float8"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Float8(ChunkWire):
    """``float8_e4m3fn`` with an fp32 scale for each chunk: 0.252 of fp32.

    A chunk's largest magnitude is sent as 448, the largest of the format's numbers. A value is off by at most 1/16 of
    itself; if that is less than 1/458,752 of its chunk's largest magnitude, by as much as this. With stochastic
    rounding, by twice as much. So it is closer than :class:`Int8` for small values of a chunk, less close for large
    ones. If a chunk holds a value that is not finite, none of its decoded values is finite.

    Args:
        chunk: how many values share a scale at most; a multiple of 8.
        rounding: ``"nearest"``, or ``"stochastic"``, whose error is zero on average.

    Raises:
        ConfigurationError: an argument is not one of the above.

    The format is that of Micikevicius et al., "FP8 formats for deep learning", 2022.

    >>> Float8()
    Float8()
    """

    @property
    def grid(self) -> Grid:
        return _E4M3()


@dataclass(frozen=True)
class _E4M3(Grid):
    bits = 8
    top = 448

    def write(self, values: Tensor, payload: Tensor, generator: torch.Generator | None) -> None:
        if generator is not None:
            # The product with top / peak can be a little larger than top, and would be rounded up.
            values.clamp_(-self.top, self.top)
        cast(values, payload.view(torch.float8_e4m3fn), generator)

    def read(self, payload: Tensor, out: Tensor) -> None:
        # As the bits of a float16, whose exponents are larger by 8; converting float8 on a CPU takes ten times as long.
        halves = payload.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        out.copy_(halves.view(torch.float16)).mul_(2.0**8)
