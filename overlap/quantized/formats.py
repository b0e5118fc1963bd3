"""How tensors travel: through a wire."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from overlap._torch.device import has_streams
from overlap.hooks.wires import BFloat16, Float16, Int8, Wire
from overlap.hooks.wires.blocks import codecs_in_runs

__all__ = ["DQuantType", "Format", "format_of"]


class DQuantType(enum.Enum):
    """What :func:`overlap.auto_quantize` sends in place of a tensor's own dtype.

    >>> collective = auto_quantize(dist.all_gather_into_tensor, DQuantType.INT8)
    >>> DQuantType("fp16")
    <DQuantType.FP16: 'fp16'>
    """

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

    def encode(
        self, tensors: Sequence[Tensor], generator: torch.Generator | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """``tensors``, each of shape ``(numel,)`` and all of one dtype, as a message each, and whether some of their
        values were saturated, a ``bool`` of shape ``()``.

        Neighbours of one length are encoded together.
        """
        device = tensors[0].device
        messages = [torch.empty(0, dtype=torch.uint8, device=device)] * len(tensors)
        saturated = [torch.zeros((), dtype=torch.bool, device=device)]
        codecs = [self.wire.codec(tensor.numel()) if tensor.numel() else None for tensor in tensors]
        # Tensors of another length may have the same codec.
        for _, neighbours in groupby(range(len(tensors)), key=lambda place: tensors[place].numel()):
            for codec, places in codecs_in_runs(codecs, neighbours, device):
                alike = [tensors[place] for place in places]
                rows, are_saturated = self._fitting(torch.stack(alike) if len(alike) > 1 else alike[0][None])
                encoded = torch.empty(len(alike), codec.message_bytes, dtype=torch.uint8, device=device)
                codec.encode_rows(rows.float(), encoded, generator)
                saturated += are_saturated
                for place, message in zip(places, encoded, strict=True):
                    messages[place] = message
        return messages, torch.stack(saturated).any()

    def read(self, messages: Tensor, numel: int) -> Tensor:
        """The ``numel`` values that each of ``messages``, shape ``(n, message_bytes)``, holds, in fp32."""
        values = torch.empty(len(messages), numel, dtype=torch.float32, device=messages.device)
        self.wire.codec(numel).decode_rows(messages, values)
        return values

    def _fitting(self, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
        """``rows`` without finite values that are too large, and whether there were any, if it was looked for."""
        if self.largest >= torch.finfo(rows.dtype).max:
            return rows, []
        if not has_streams(rows.device):
            smallest, largest = torch.aminmax(rows)
            if float(smallest) >= -self.largest and float(largest) <= self.largest:
                return rows, []
        # Half precision does not hold the largest number of every type.
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        fitting = wide.clamp(-self.largest, self.largest)
        # Infinity stays what it is: only what was finite is kept so.
        fitting = torch.where(wide.isinf(), wide, fitting)
        return fitting, [((fitting != wide) & ~wide.isnan()).any()]


_WIRES = {DQuantType.FP16: Float16(), DQuantType.BFP16: BFloat16(), DQuantType.INT8: Int8()}


def format_of(kind: DQuantType | Wire) -> Format:
    """The format of a type."""
    return Format(kind if isinstance(kind, Wire) else _WIRES[kind])
