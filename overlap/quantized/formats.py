"""How tensors travel: through a wire."""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from overlap.hooks.wires import BFloat16, Float16, Int8, Wire

__all__ = ["DQuantType", "Format", "format_of"]


class DQuantType(enum.Enum):
    """What :func:`overlap.auto_quantize` sends in place of a tensor's own dtype."""

    FP16 = "fp16"
    """:class:`overlap.Float16`: 11 bits of precision, up to 65,504."""
    BFP16 = "bfp16"
    """:class:`overlap.BFloat16`: 8 bits of precision, the range of fp32."""
    INT8 = "int8"
    """:class:`overlap.Int8`: integers of 8 bits with an fp32 scale for each 512 values."""

    def __str__(self) -> str:
        return self.value


class Format:
    """Between flat floating-point tensors and messages of a wire; what is finite and too large is saturated."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    @property
    def largest(self) -> float:
        """The largest magnitude that it holds; what is finite and larger is saturated."""
        return self.wire.largest

    def message_bytes(self, numel: int) -> int:
        """Of ``numel`` values."""
        return self.wire.codec(numel).message_bytes

    def encode(self, values: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """``values``, shape ``(numel,)``, as a message, and whether some were saturated, a ``bool`` of shape ``()``."""
        if values.dtype.itemsize < torch.float32.itemsize:
            values = values.float()
        overflowed = ((values.abs() > self.largest) & values.isfinite()).any()
        # Infinity stays what it is: only what was finite is kept so.
        fitting = torch.where(values.isinf(), values, values.clamp(-self.largest, self.largest))
        codec = self.wire.codec(values.numel())
        padded = torch.nn.functional.pad(fitting.float(), (0, codec.numel - values.numel()))
        message = torch.empty(codec.message_bytes, dtype=torch.uint8, device=values.device)
        codec.encode(padded, message, generator)
        return message, overflowed

    def read(self, message: Tensor, numel: int) -> Tensor:
        """The ``numel`` values that ``message`` holds, in fp32."""
        codec = self.wire.codec(numel)
        values = torch.empty(codec.numel, dtype=torch.float32, device=message.device)
        codec.decode(message, values)
        return values[:numel]


_WIRES = {DQuantType.FP16: Float16(), DQuantType.BFP16: BFloat16(), DQuantType.INT8: Int8()}


def format_of(kind: DQuantType | Wire) -> Format:
    """The format of a type."""
    return Format(kind if isinstance(kind, Wire) else _WIRES[kind])
