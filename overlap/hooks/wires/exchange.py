"""Messages between ranks, encoded by a wire.

``swap`` sends each other rank a message of its own, ``sum_in_order`` adds up the received ones, and
:class:`QuantizedSum` is a sum over ranks made of both. The sharded update and the quantized collectives use the first
two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from overlap.hooks.collectives import all_gather, send_recv
from overlap.hooks.wires.blocks import Codec
from overlap.hooks.wires.wire import Wire

__all__ = ["QuantizedSum", "sum_in_order", "swap"]

_ByRank = Sequence[Tensor] | Mapping[int, Tensor] | Tensor
"""A tensor for each rank; this rank's own is not read."""


async def swap(sent: _ByRank, received: _ByRank, *, group: dist.ProcessGroup, label: str = "send_recv") -> None:
    """Send ``sent[r]`` to each other rank ``r`` and receive from it into ``received[r]``; empty ones are not sent.

    Each rank starts with the next one, so that not all send to the same rank at once.

    Communication: a send and a receive with every other rank. ``label`` names it in profiles.
    """
    ranks, rank = group.size(), group.rank()
    peers = [(rank + distance) % ranks for distance in range(1, ranks)]
    await send_recv(
        [(sent[peer], peer) for peer in peers if sent[peer].numel()],
        [(received[peer], peer) for peer in peers if received[peer].numel()],
        group=group,
        label=label,
    )


def sum_in_order(codec: Codec, own: Tensor, received: Tensor, rank: int) -> Tensor:
    """The sum, in the order of ranks, of ``own`` and the values of the other ranks' messages.

    Args:
        codec: of the messages.
        own: the values of this ``rank``, fp32 of shape ``(numel,)``; may be overwritten by the sum.
        received: a message from each rank, of shape ``(W, message_bytes)``; row ``rank`` is not read.
    """
    total = own
    if rank:
        total = torch.empty_like(own)
        codec.decode_rows(received[:1], total[None])
        codec.add_rows(received[1:rank], total)
        total.add_(own)
    codec.add_rows(received[rank + 1 :], total)
    return total


@dataclass(frozen=True)
class QuantizedSum:
    """Sums values over the ranks of ``group``, with traffic that does not grow with their number.

    Each rank owns an equal part of the values. It sends each other rank that rank's part, quantized, sums in fp32 the
    messages for its own part, quantizes the sum, and the sums are gathered. A rank sends as many values as in an
    all-reduce, ``2 (W-1)/W`` of them, and their scales.
    """

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
                made, in its messages and in the sum of its own part. Their sum over ranks is the error of the result.
            out: of the same shape; may be ``values`` itself, and then the rounding errors are not computed.

        One rank alone rounds nothing.

        Communication: a send and a receive of ``1/W`` of the values with every other rank, and an all-gather of as
        much.
        """
        keeps_errors = out is not values
        numel, ranks = values.numel(), self.group.size()
        if ranks == 1 or numel == 0:
            if keeps_errors:
                out.copy_(values)
                values.zero_()
            return
        if numel < (ranks - 1) * self.codec.numel:
            # So few values that some ranks would own none.
            padded = pad(values, (0, ranks * self.codec.numel - numel))
            result = torch.empty_like(padded) if keeps_errors else padded
            await self._sum(padded, result)
            values.copy_(padded[:numel])
            out.copy_(result[:numel])
            return
        await self._sum(values, out)

    async def _sum(self, values: Tensor, out: Tensor) -> None:
        codec, ranks, rank = self.codec, self.group.size(), self.group.rank()
        encode = codec.encode_rows if out is values else codec.subtract_rows
        # Starting with the next rank spreads the senders over the receivers.
        others = [slice(rank + 1, ranks), slice(0, rank)]
        device, message_bytes = values.device, codec.message_bytes
        sent = torch.empty(ranks - 1, message_bytes, dtype=torch.uint8, device=device)
        peers: list[int] = []
        for some in others:
            for parts, theirs in self._parts(values, some):
                encode(parts, sent[len(peers) : len(peers) + len(parts)], self.generator)
                peers += range(theirs.start, theirs.stop)
        received = torch.empty(ranks, message_bytes, dtype=torch.uint8, device=device)
        await swap(dict(zip(peers, sent, strict=True)), received, group=self.group)
        del sent
        total = values[rank * codec.numel : (rank + 1) * codec.numel]
        for some in others:
            codec.add_rows(received[some], total)
        encode(total[None], received[rank : rank + 1], self.generator)
        await all_gather(received.view(-1), received[rank], group=self.group)
        for parts, theirs in self._parts(out, slice(0, ranks)):
            codec.decode_rows(received[theirs], parts)

    def _parts(self, values: Tensor, ranks: slice) -> Iterator[tuple[Tensor, slice]]:
        """Views ``(n, part)`` of the parts of ``ranks``, and their ranks; the last rank's may be short."""
        part = self.codec.numel
        end = min(ranks.stop, values.numel() // part)
        if ranks.start < end:
            yield values[ranks.start * part : end * part].view(-1, part), slice(ranks.start, end)
        if max(ranks.start, end) < ranks.stop:
            yield values[None, end * part :], slice(end, ranks.stop)
