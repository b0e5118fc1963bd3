"""Half precision."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap.hooks.wires.blocks import BlockCodec, Field
from overlap.hooks.wires.noise import NOISE_BITS, add_noise_
from overlap.hooks.wires.wire import RoundingWire

__all__ = ["BFloat16", "CastCodec", "CastWire", "Float16", "cast"]


def cast(values: Tensor, out: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Write ``values`` to ``out`` in its dtype, rounded to nearest, or with a ``generator`` stochastically."""
    return out.copy_(values if generator is None else _between_neighbours(values, out.dtype, generator))


def _between_neighbours(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """``values``, fp32, each rounded to one of the two numbers of ``dtype`` beside it, by chance, with its own mean."""
    of_dtype, of_fp32 = torch.finfo(dtype), torch.finfo(torch.float32)
    # The bits of the exponent alone are the largest power of two that is not larger; zero for denormal numbers.
    powers = values.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    # Below its smallest normal number the numbers of a dtype lie evenly. Infinity over infinity would be NaN.
    smallest = max(of_dtype.tiny, of_fp32.tiny / of_dtype.eps)
    spacing = powers.clamp_(min=smallest, max=2.0**127).mul_(of_dtype.eps)
    # No finer than fp32 is where the sum lies, so that a number of the dtype stays what it is.
    bits = min(NOISE_BITS, round(math.log2(of_dtype.eps / of_fp32.eps)))
    return add_noise_(values / spacing, generator, bits=bits).round_().mul_(spacing)


@dataclass(frozen=True, kw_only=True, repr=False)
class CastWire(RoundingWire):
    """Values in another floating-point dtype."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """What is sent."""

    @property
    def largest(self) -> float:
        return torch.finfo(self.dtype).max

    def codec(self, numel: int) -> CastCodec:
        return CastCodec(self.dtype, numel)


@dataclass(frozen=True, kw_only=True, repr=False)
class Float16(CastWire):
    """``float16``: 0.5 of fp32, with 11 bits of precision up to 65,504.

    A value is off by at most 2**-11 of itself, below 6.1e-5 by 2**-25; by twice as much with stochastic rounding.
    Larger values become infinite: scale them, as ``torch.amp.GradScaler`` does, which then sees the overflow.

    Args:
        rounding: ``"nearest"``, or ``"stochastic"``, whose error is zero on average.

    Raises:
        ConfigurationError: an argument is not one of the above.

    >>> Float16()
    Float16()
    """

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16


@dataclass(frozen=True, kw_only=True, repr=False)
class BFloat16(CastWire):
    """``bfloat16``: 0.5 of fp32, with its range and 8 bits of precision.

    A value is off by at most 2**-8 of itself; by twice as much with stochastic rounding, or 1.2e-38 if that is more.
    Values above 3.39e38 become infinite.

    Args:
        rounding: ``"nearest"``, or ``"stochastic"``, whose error is zero on average.

    Raises:
        ConfigurationError: an argument is not one of the above.

    >>> BFloat16(rounding="stochastic")
    BFloat16(rounding='stochastic')
    """

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16


@dataclass(frozen=True)
class CastCodec(BlockCodec):
    """A message holds the values one after another."""

    dtype: torch.dtype
    chunks: int
    chunk_numel: int = 1

    @property
    def fields(self) -> tuple[Field, ...]:
        return (Field(self.dtype, 1),)

    def write(self, values: Tensor, fields: tuple[Tensor, ...], generator: torch.Generator | None) -> None:
        cast(values, fields[0], generator)

    def read(self, fields: tuple[Tensor, ...], out: Tensor) -> None:
        out.copy_(fields[0])
