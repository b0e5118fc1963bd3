"""The mean of factors over ranks, sent through a wire.

[Note: what the wire leaves out of factors]

A rank's part in the sum is what the others decode of its messages, and for the part of the values that it owns, less
what rounding the sum loses. These parts add up over ranks to the mean that all decode, exactly but for fp32's own
rounding. So a rank's residual is its matrix minus the basis times *its part*: what the wire left out of coefficients
stays in the residual together with what the basis left out, and comes again. Rounding errors in a factor that becomes
the basis are not lost gradients: any basis will do, as long as all ranks have the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap.hooks.bucket import Bucket
from overlap.hooks.wires import QuantizedSum, RoundingGenerator, Wire

__all__ = ["WiredMean"]


@dataclass(frozen=True)
class WiredMean:
    """The mean of factors, by messages of ``wire`` and a gather of encoded sums."""

    wire: Wire
    generator: RoundingGenerator

    async def __call__(self, factors: Tensor, bucket: Bucket) -> Tensor:
        """The mean, the same on every rank bit for bit; changes ``factors`` to this rank's part, times the divisor."""
        values = factors.mul(1 / bucket.divisor).float()
        mean = torch.empty_like(values)
        if bucket.group.size() > 1:
            left_out = values.clone()
            await self._sum(values.numel(), bucket)(left_out, out=mean)
            values.sub_(left_out)
        else:
            mean.copy_(values)
        factors.copy_(values).mul_(bucket.divisor)
        return mean.to(factors.dtype)

    def sent_numel(self, numel: int, bucket: Bucket) -> int:
        """The elements of the bucket's dtype that ``numel`` values have the bytes of."""
        if bucket.group.size() == 1:
            return numel
        message_bytes = self._sum(numel, bucket).codec.message_bytes
        return math.ceil(bucket.group.size() * message_bytes / bucket.buffer.dtype.itemsize)

    def _sum(self, numel: int, bucket: Bucket) -> QuantizedSum:
        generator = self.generator.of(bucket.group.rank(), bucket.buffer.device)
        return QuantizedSum.of(numel, wire=self.wire, generator=generator, group=bucket.group)
