"""How tensors travel: as bytes of two kinds of half precision, or as 8-bit integers with scales."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from overlap.hooks.wires import Codec, Int8

__all__ = ["CastFormat", "DQuantType", "Format", "IntegerFormat", "format_of"]


class DQuantType(enum.Enum):
    """What :func:`overlap.auto_quantize` sends in place of a tensor's own dtype."""

    FP16 = "fp16"
    """``float16``: 11 bits of precision, up to 65,504."""
    BFP16 = "bfp16"
    """``bfloat16``: 8 bits of precision, the range of fp32."""
    INT8 = "int8"
    """Integers of 8 bits with an fp32 scale for each 512 values; see :class:`overlap.hooks.Quantize`."""

    def __str__(self) -> str:
        return self.value


class Format(ABC):
    """Between flat floating-point tensors and messages of bytes, whose length the number of values decides."""

    largest: float
    """The largest magnitude that it holds; what is finite and larger is saturated."""

    @abstractmethod
    def message_bytes(self, numel: int) -> int:
        """Of ``numel`` values; a multiple of 4, so that messages can follow each other."""

    @abstractmethod
    def write(self, values: Tensor, message: Tensor) -> None:
        """Write ``values``, all of which fit or are not finite, into ``message``, uint8."""

    @abstractmethod
    def read(self, message: Tensor, numel: int) -> Tensor:
        """The ``numel`` values that ``message`` holds, in fp32."""

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """``values``, shape ``(numel,)``, as a message, and whether some were saturated, a ``bool`` of shape ``()``."""
        if values.dtype.itemsize < torch.float32.itemsize:
            values = values.float()
        overflowed = ((values.abs() > self.largest) & values.isfinite()).any()
        # Infinity stays what it is: only what was finite is kept so.
        fitting = torch.where(values.isinf(), values, values.clamp(-self.largest, self.largest))
        message = torch.zeros(self.message_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        self.write(fitting, message)
        return message, overflowed


class CastFormat(Format):
    """Another floating-point dtype, rounded to nearest."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.largest = torch.finfo(dtype).max

    def message_bytes(self, numel: int) -> int:
        return -(-numel * self.dtype.itemsize // 4) * 4

    def write(self, values: Tensor, message: Tensor) -> None:
        message.view(self.dtype)[: values.numel()].copy_(values)

    def read(self, message: Tensor, numel: int) -> Tensor:
        if numel == 0:  # Where an empty message begins is anywhere, and not where the dtype can begin.
            return torch.empty(0, device=message.device)
        return message.view(self.dtype)[:numel].float()


class IntegerFormat(Format):
    """Chunks of integers; one with a value that is not finite arrives with none that is."""

    largest = torch.finfo(torch.float32).max

    def _codec(self, numel: int) -> Codec:
        return Int8().codec(numel)

    def message_bytes(self, numel: int) -> int:
        return self._codec(numel).message_bytes

    def write(self, values: Tensor, message: Tensor) -> None:
        codec = self._codec(values.numel())
        padded = torch.zeros(codec.numel, dtype=torch.float32, device=values.device)
        padded[: values.numel()].copy_(values)
        codec.encode(padded, message)

    def read(self, message: Tensor, numel: int) -> Tensor:
        codec = self._codec(numel)
        values = torch.empty(codec.numel, dtype=torch.float32, device=message.device)
        codec.decode(message, values)
        return values[:numel]


def format_of(kind: DQuantType) -> Format:
    """The format of a type."""
    if kind is DQuantType.INT8:
        return IntegerFormat()
    return CastFormat(torch.float16 if kind is DQuantType.FP16 else torch.bfloat16)
