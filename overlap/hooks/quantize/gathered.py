"""Gradients gathered in 8 bits, as PyTorch's quantization hooks do; the traffic grows with the number of ranks."""

from __future__ import annotations

import torch

from overlap._checks import told
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import all_gather
from overlap.hooks.stage import Stage
from overlap.hooks.wires.affine import Affine8

__all__ = ["GatherQuantized"]


class GatherQuantized(Stage):
    """The mean over ranks of gradients sent as unsigned 8-bit integers, with a scale and a zero point per chunk.

    See :class:`overlap.hooks.wires.affine.Affine8`: the error is at most half a scale, and zero is exact. If a value is
    not finite, all values that share its scale become NaN.

    Args:
        chunk: how many values share a scale; the whole bucket where ``None``.

    Issues: one all-gather of ``numel`` bytes, padded to whole chunks, and 8 bytes per scale. Changes:
    ``bucket.buffer``.

    >>> chain(GatherQuantized(512)).register(ddp)
    <chain(GatherQuantized(512)) registered>
    >>> loss_fn(ddp(x), y).backward()
    """

    def __init__(self, chunk: int | None) -> None:
        if chunk is not None and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk <= 0):
            raise ConfigurationError(f"bucket_size is {told(chunk)}: give a positive number of values, such as 512")
        self.chunk = chunk

    async def __call__(self, bucket: Bucket) -> None:
        buffer = bucket.buffer
        if not buffer.is_floating_point():
            raise UnsupportedError(f"{self!r} cannot keep {buffer.dtype} gradients; use AllReduce()")
        if buffer.numel() == 0:
            return
        codec = Affine8(self.chunk).codec(buffer.numel())
        values = torch.nn.functional.pad(buffer.float(), (0, codec.numel - buffer.numel()))
        message = torch.empty(codec.message_bytes, dtype=torch.uint8, device=buffer.device)
        codec.encode(values, message)
        ranks = bucket.group.size()
        gathered = torch.empty(ranks * message.numel(), dtype=torch.uint8, device=buffer.device)
        await all_gather(gathered, message, group=bucket.group)
        total = torch.zeros_like(values)
        # Divided before the sum, so that a sum of large values does not overflow.
        codec.add_rows(gathered.view(ranks, -1), total, alpha=1 / bucket.divisor)
        buffer.copy_(total[: buffer.numel()])

    def __repr__(self) -> str:
        return f"GatherQuantized({self.chunk})"
