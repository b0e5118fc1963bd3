"""Unsigned integers of 8 bits with a scale and a zero point, as in PyTorch's quantization hooks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap.hooks.wires.wire import Codec, Combine, Wire, aligned, at_a_time

__all__ = ["Affine8", "AffineCodec"]

_TOP = 255
# Scale and zero point, in fp32.
_PARAMETERS_BYTES = 8


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
class AffineCodec(Codec):
    """A message holds scale and zero point of each chunk in fp32, then the chunks' integers."""

    chunks: int
    chunk_numel: int

    @property
    def numel(self) -> int:
        return self.chunks * self.chunk_numel

    @property
    def message_bytes(self) -> int:
        return aligned(self.chunks * _PARAMETERS_BYTES + self.numel)

    def encode(self, values: Tensor, message: Tensor, generator: torch.Generator | None = None) -> None:
        for chunk_values, parameters, integers in self._blocks(values, message):
            low, high = torch.aminmax(chunk_values, dim=1, keepdim=True)
            low, high = low.clamp(max=0), high.clamp(min=0)
            # Halved, so that the difference of the largest numbers does not overflow; never zero: it is a divisor.
            scale = ((high / 2 - low / 2) / (_TOP / 2)).clamp(min=torch.finfo(torch.float32).tiny)
            scale = torch.where(scale.isfinite(), scale, torch.nan)
            zero_point = (-(low / scale).round()).clamp(0, _TOP)
            torch.cat([scale, zero_point], dim=1, out=parameters)
            integers.copy_((chunk_values / scale).round_().add_(zero_point).clamp_(0, _TOP))

    def decode(self, message: Tensor, out: Tensor, combine: Combine | None = None) -> None:
        for chunk_values, parameters, integers in self._blocks(out, message):
            scale, zero_point = parameters.split(1, dim=1)
            decoded = (integers.float() - zero_point).mul_(scale)
            if combine is None:
                chunk_values.copy_(decoded)
            else:
                combine(chunk_values, decoded)

    def _blocks(self, values: Tensor, message: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views of a few chunks at a time: values, scales with zero points of shape ``(n, 2)``, integers."""
        if self.numel == 0:
            return
        end = self.chunks * _PARAMETERS_BYTES
        views = (
            values.view(self.chunks, self.chunk_numel),
            message[:end].view(torch.float32).view(self.chunks, 2),
            message[end : end + self.numel].view(self.chunks, self.chunk_numel),
        )
        rows = at_a_time(self.chunks, self.chunk_numel, values.device)
        yield from zip(*(view.split(rows) for view in views), strict=True)
