"""Messages between ranks, encoded by a wire.

``swap`` sends each other rank a message of its own, ``sum_in_order`` adds up what comes in, and :class:`QuantizedSum`
is a sum over ranks made of both. The sharded update and the quantized collectives use the first two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from overlap.hooks.collectives import all_gather, send_recv
from overlap.hooks.wires.wire import Codec, Wire

__all__ = ["QuantizedSum", "sum_in_order", "swap"]

_Encode = Callable[[Tensor, Tensor, torch.Generator | None], None]


_ByRank = Sequence[Tensor] | Mapping[int, Tensor] | Tensor
"""A tensor for each rank; this rank's own is not looked at."""


async def swap(sent: _ByRank, received: _ByRank, *, group: dist.ProcessGroup, label: str = "send_recv") -> None:
    """Send ``sent[r]`` to each other rank ``r`` and receive from it into ``received[r]``; empty ones do not travel.

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
    """The sum, in the order of ranks, of ``own`` and of what the other ranks' messages hold.

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

    Each rank owns an equal part of the values. It sends each other rank that rank's part, quantized, sums in fp32 what
    it receives for its own part, quantizes the sum, and the sums are gathered. A rank sends as many values as in an
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
                made, in what it sent and in the sum of its own part. Their sum over ranks is the error of the result.
            out: of the same shape; may be ``values`` itself, and then the rounding errors are not computed.

        One rank alone rounds nothing.

        Communication: a send and a receive of ``1/W`` of the values with every other rank, and an all-gather of as
        much.
        """
        missing = out is not values
        if self.group.size() == 1 or values.numel() == 0:
            if missing:
                out.copy_(values)
                values.zero_()
            return
        ranks, rank = self.group.size(), self.group.rank()
        parts = _Parts.of(values, self.codec.numel, ranks)
        # Starting with the next rank spreads the senders over the receivers.
        others = [slice(rank + 1, ranks), slice(0, rank)]
        encode = self.codec.subtract_rows if missing else self.codec.encode_rows
        messages = await self._exchanged(parts, others, encode)
        total = parts.of_rank(rank)
        for theirs in others:
            self.codec.add_rows(messages[theirs], total)
        encode(total[None], messages[rank : rank + 1], self.generator)
        if missing:
            parts.put_back()
        await all_gather(messages.view(-1), messages[rank], group=self.group)
        results = _Parts.of(out, self.codec.numel, ranks) if missing else parts
        for rows, theirs in results.at([slice(0, ranks)]):
            self.codec.decode_rows(messages[theirs], rows)
        results.put_back()

    async def _exchanged(self, parts: _Parts, others: Sequence[slice], encode: _Encode) -> Tensor:
        """Each rank's message for this one, by rank, with room for this rank's own; what was sent is given back."""
        device, message_bytes = parts.full.device, self.codec.message_bytes
        sent = torch.empty(self.group.size() - 1, message_bytes, dtype=torch.uint8, device=device)
        peers, end = [peer for some in others for peer in range(some.start, some.stop)], 0
        for rows, _ in parts.at(others):
            start, end = end, end + len(rows)
            encode(rows, sent[start:end], self.generator)
        received = torch.empty(self.group.size(), message_bytes, dtype=torch.uint8, device=device)
        await swap(dict(zip(peers, sent, strict=True)), received, group=self.group)
        return received


@dataclass(frozen=True)
class _Parts:
    """Values by rank, a row for each rank."""

    full: Tensor
    """Views of the first ranks' parts, shape ``(n, part)``."""
    rest: Tensor
    """The other ranks' parts. Of one rank a view, shape ``(1, n)``, which may be shorter than a part; of several, whose
    parts are short, copies, padded with zeros, shape ``(W - n, part)``."""
    tail: Tensor
    """The values of ``rest``."""

    @classmethod
    def of(cls, values: Tensor, part_numel: int, ranks: int) -> _Parts:
        full = values.numel() // part_numel
        head, tail = values.tensor_split([full * part_numel])
        short = ranks - full
        rest = tail[None]
        if short != 1:
            rest = pad(tail, (0, short * part_numel - tail.numel())).view(short, part_numel)
        return cls(head.view(full, part_numel), rest, tail)

    def of_rank(self, rank: int) -> Tensor:
        full = len(self.full)
        return self.full[rank] if rank < full else self.rest[rank - full]

    def at(self, ranks: Sequence[slice]) -> Iterator[tuple[Tensor, slice]]:
        """The rows of ``ranks``, in runs, and the ranks of each run."""
        full, count = len(self.full), len(self.full) + len(self.rest)
        for some in ranks:
            for rows, first, end in ((self.full, 0, full), (self.rest, full, count)):
                start, stop = max(some.start, first), min(some.stop, end)
                if start < stop:
                    yield rows[start - first : stop - first], slice(start, stop)

    def put_back(self) -> None:
        """Copy back to the values what is a copy."""
        if len(self.rest) > 1:
            self.tail.copy_(self.rest.view(-1)[: self.tail.numel()])
