"""Gradients gathered in 8 bits, as PyTorch's quantization hooks do; the traffic grows with the number of ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import all_gather
from overlap.hooks.stage import Stage

__all__ = ["GatherQuantized"]

_TOP = 255
# Scale and zero point, in fp32.
_PARAMETERS_BYTES = 8


class GatherQuantized(Stage):
    """The mean over ranks of gradients sent as unsigned 8-bit integers, with a scale and a zero point per chunk.

    ``x`` becomes ``round(x / scale) + zero_point``, where the range 0 to 255 covers the smallest value, the largest
    value and zero. The error is at most half a scale, and zero is exact. If a value is not finite, all values that
    share its scale become NaN.

    Args:
        chunk: how many values share a scale; the whole bucket where ``None``.

    Issues: one all-gather of ``numel`` bytes, padded to whole chunks, and 8 bytes per scale. Changes:
    ``bucket.buffer``.
    """

    def __init__(self, chunk: int | None) -> None:
        if chunk is not None and (not isinstance(chunk, int) or chunk <= 0):
            raise ConfigurationError(f"bucket_size is {chunk!r}: give a positive number of values, such as 512")
        self.chunk = chunk

    async def __call__(self, bucket: Bucket) -> None:
        buffer = bucket.buffer
        if not buffer.is_floating_point():
            raise UnsupportedError(f"{self!r} cannot keep {buffer.dtype} gradients; use AllReduce()")
        if buffer.numel() == 0:
            return
        chunks = _in_chunks(buffer, self.chunk or buffer.numel())
        message = _encode(chunks)
        ranks = bucket.group.size()
        gathered = torch.empty(ranks * message.numel(), dtype=torch.uint8, device=buffer.device)
        await all_gather(gathered, message, group=bucket.group)
        total = torch.zeros_like(chunks)
        for one in gathered.view(ranks, -1):
            _add_decoded(one, total, bucket.divisor)
        buffer.copy_(total.view(-1)[: buffer.numel()])

    @property
    def signature(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        return f"GatherQuantized({self.chunk or ''})"


def _in_chunks(buffer: Tensor, chunk: int) -> Tensor:
    """``buffer`` in fp32, padded with zeros to shape ``(chunks, chunk)``."""
    count = -(-buffer.numel() // chunk)
    return torch.nn.functional.pad(buffer.float(), (0, count * chunk - buffer.numel())).view(count, chunk)


def _encode(chunks: Tensor) -> Tensor:
    """A message of scales and zero points, fp32 of shape ``(chunks, 2)``, then the integers."""
    low, high = torch.aminmax(chunks, dim=1, keepdim=True)
    low, high = low.clamp(max=0), high.clamp(min=0)
    # Halved, so that the difference of the largest numbers does not overflow; never zero, since it is a divisor.
    scale = ((high / 2 - low / 2) / (_TOP / 2)).clamp(min=torch.finfo(torch.float32).tiny)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    zero_point = (-(low / scale).round()).clamp(0, _TOP)
    integers = ((chunks / scale).round_() + zero_point).clamp_(0, _TOP).to(torch.uint8)
    return torch.cat([torch.cat([scale, zero_point], dim=1).view(torch.uint8).view(-1), integers.view(-1)])


def _add_decoded(message: Tensor, total: Tensor, divisor: int) -> None:
    end = len(total) * _PARAMETERS_BYTES
    # A copy, because a message between others may not be aligned.
    scale, zero_point = message[:end].clone().view(torch.float32).view(-1, 2).split(1, dim=1)
    integers = message[end:].view_as(total)
    # Divided before the sum, so that a sum of large values does not overflow.
    total.add_((integers.float() - zero_point) * (scale / divisor))
