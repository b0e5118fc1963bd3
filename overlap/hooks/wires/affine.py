"""Unsigned integers of 8 bits with a scale and a zero point, as in PyTorch's quantization hooks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap.hooks.wires.blocks import BlockCodec, Field
from overlap.hooks.wires.wire import Wire

__all__ = ["Affine8", "AffineCodec"]

_TOP = 255


@dataclass(frozen=True, repr=False)
class Affine8(Wire):
    """Integers 0 to 255, with a scale and a zero point for each chunk: 0.254 of fp32.

    ``x`` becomes ``round(x / scale) + zero_point``, where the range covers the smallest value, the largest value and
    zero. The error is at most half a scale, and zero is exact. If a value is not finite, all values that share its
    scale become NaN.

    Args:
        chunk: how many values share a scale; all where ``None``.
    """

    chunk: int | None = 512

    def codec(self, numel: int) -> AffineCodec:
        chunk = self.chunk or numel
        return AffineCodec(math.ceil(numel / chunk) if numel else 0, chunk)


@dataclass(frozen=True)
class AffineCodec(BlockCodec):
    """A message holds scale and zero point of each chunk in fp32, then the chunks' integers."""

    chunks: int
    chunk_numel: int

    @property
    def fields(self) -> tuple[Field, ...]:
        return Field(torch.float32, 2), Field(torch.uint8, self.chunk_numel)

    def write(self, values: Tensor, fields: tuple[Tensor, ...], generator: torch.Generator | None) -> None:
        parameters, integers = fields
        low, high = torch.aminmax(values, dim=-1, keepdim=True)
        low, high = low.clamp(max=0), high.clamp(min=0)
        # Halved, so that the difference of the largest numbers does not overflow; never zero: it is a divisor.
        scale = ((high / 2 - low / 2) / (_TOP / 2)).clamp(min=torch.finfo(torch.float32).tiny)
        scale = torch.where(scale.isfinite(), scale, torch.nan)
        zero_point = (-(low / scale).round()).clamp(0, _TOP)
        torch.cat([scale, zero_point], dim=-1, out=parameters)
        integers.copy_((values / scale).round_().add_(zero_point).clamp_(0, _TOP))

    def read(self, fields: tuple[Tensor, ...], out: Tensor) -> None:
        parameters, integers = fields
        scale, zero_point = parameters.split(1, dim=-1)
        torch.sub(integers, zero_point, out=out)
        out.mul_(scale)
