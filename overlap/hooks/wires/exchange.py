"""A sum over ranks in quantized messages, whose traffic does not grow with the number of ranks.

Each rank owns an equal part of the values. It sends each other rank that rank's part, quantized, sums in fp32 what it
receives for its own part, quantizes the sum, and the sums are gathered. A rank sends as many values as in an
all-reduce, ``2 (W-1)/W`` of them, and their scales.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from overlap.hooks.collectives import all_gather, send_recv
from overlap.hooks.wires.wire import Codec, Wire

__all__ = ["QuantizedSum"]


@dataclass(frozen=True)
class QuantizedSum:
    """Sums values over the ranks of ``group``."""

    codec: Codec
    """Encodes one rank's part."""
    generator: torch.Generator | None
    """Rounds stochastically."""
    group: dist.ProcessGroup

    @classmethod
    def of(cls, numel: int, *, wire: Wire, generator: torch.Generator | None, group: dist.ProcessGroup) -> QuantizedSum:
        """For ``numel`` values on each rank."""
        return cls(wire.codec(math.ceil(numel / group.size())), generator, group)

    async def __call__(self, values: Tensor, *, out: Tensor) -> None:
        """Write the sum of ``values`` over ranks to ``out``, the same on all ranks bit for bit.

        Args:
            values: this rank's summand, fp32 of shape ``(numel,)``; overwritten with the rounding errors that this rank
                made, in what it sent and in the sum of its own part. Their sum over ranks is the error of the result.
            out: of the same shape; may be ``values`` itself, and then the rounding errors are not computed.

        One rank alone rounds nothing.

        Issues: a send and a receive of ``1/W`` of the values with every other rank, and an all-gather of as much.
        """
        missing = out is not values
        if self.group.size() == 1 or values.numel() == 0:
            if missing:
                out.copy_(values)
                values.zero_()
            return
        ranks, rank = self.group.size(), self.group.rank()
        parts = self._parts(values)
        messages = torch.empty(ranks, self.codec.message_bytes, dtype=torch.uint8, device=values.device)
        received = torch.empty_like(messages)
        # Starting with the next rank spreads the senders over the receivers.
        peers = [(rank + distance) % ranks for distance in range(1, ranks)]
        for peer in peers:
            self.codec.encode(parts[peer], messages[peer], self.generator)
            if missing:
                self.codec.decode(messages[peer], parts[peer], Tensor.sub_)
        await send_recv(
            [(messages[peer], peer) for peer in peers], [(received[peer], peer) for peer in peers], group=self.group
        )
        own = parts[rank]
        for peer in peers:
            self.codec.decode(received[peer], own, Tensor.add_)
        self.codec.encode(own, messages[rank], self.generator)
        if missing:
            self.codec.decode(messages[rank], own, Tensor.sub_)
        await all_gather(received.view(-1), messages[rank], group=self.group)
        results = self._parts(out) if missing else parts
        for message, part in zip(received, results, strict=True):
            self.codec.decode(message, part)
        self._put_back(results, out)
        if missing:
            self._put_back(parts, values)

    def _parts(self, values: Tensor) -> list[Tensor]:
        """``values`` by rank: views of it, or copies padded with zeros where a part is not full."""
        numel = self.codec.numel
        return [view if view.numel() == numel else pad(view, (0, numel - view.numel())) for view in self._views(values)]

    def _put_back(self, parts: list[Tensor], values: Tensor) -> None:
        """Copy back to ``values`` those ``parts`` that are copies."""
        for view, part in zip(self._views(values), parts, strict=True):
            if view.numel() < part.numel():
                view.copy_(part[: view.numel()])

    def _views(self, values: Tensor) -> list[Tensor]:
        ends = [min(rank * self.codec.numel, values.numel()) for rank in range(self.group.size() + 1)]
        return [values[start:end] for start, end in itertools.pairwise(ends)]
