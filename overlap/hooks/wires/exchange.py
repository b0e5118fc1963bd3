"""A sum over ranks by messages that a wire encodes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from overlap._torch.device import has_streams
from overlap.hooks.collectives import all_gather, all_to_all, reduce_scatter
from overlap.hooks.wires.codec import Wire
from overlap.ranks.machines import Levels


class QuantizedSum:
    """Sums ``numel`` values over the ranks of ``group``, with traffic that does not grow with their number.

    Each rank owns an equal part of the values. It sends each other rank that rank's part, quantized, sums in fp32 the
    messages for its own part, quantizes the sum, and the sums are gathered. A rank sends as many values as in an
    all-reduce, ``2 (W-1)/W`` of them, and their scales.

    With ``levels``, of ``L`` ranks on each of ``M`` machines, every rank first gets the sum over its machine of ``1/L``
    of the values in fp32 (reduce-scatter). That is summed as above over the ranks with the same number on the other
    machines, and the sums are gathered within each machine in fp32. So each value is encoded once a machine, and a
    machine sends ``2 (M-1)/M`` encoded values to others, where all of its ranks by themselves would send ``L`` times as
    many. ``generator`` rounds stochastically.
    """

    def __init__(
        self,
        numel: int,
        *,
        wire: Wire,
        generator: torch.Generator | None,
        group: dist.ProcessGroup,
        levels: Levels | None = None,
    ) -> None:
        self.codec = wire.codec(math.ceil(numel / group.size()))
        """Encodes one rank's part."""
        self.padded_numel = group.size() * self.codec.numel
        """Values of all parts, padding included."""
        self._generator = generator
        self._group = group
        self._levels = levels

    async def __call__(self, values: Tensor, *, out: Tensor) -> None:
        """Write the sum of ``values`` over ranks to ``out``, the same on all ranks bit for bit.

        Args:
            values: this rank's summand, fp32 of shape ``(numel,)``, or ``(padded_numel,)`` with zeros at its end, which
                saves a copy; overwritten with the rounding errors that this rank made, in its messages and in the sum
                of its own part. Their sum over ranks is the error of the result.
            out: of shape ``(numel,)``; may be ``values`` itself, and then the rounding errors are not computed.

        One rank alone rounds nothing.
        """
        keeps_errors = out is not values
        given, numel, levels = values.numel(), out.numel(), self._levels
        if self._group.size() == 1 or numel == 0:
            if keeps_errors:
                out.copy_(values[:numel])
                values.zero_()
            return
        # One part may be short, which saves a copy, but none may be missing.
        can_be_short = levels is None and not has_streams(values.device)
        is_whole = given >= self.padded_numel - (self.codec.numel if can_be_short else 0)
        summand = values if is_whole else pad(values, (0, self.padded_numel - given))
        result = summand
        if keeps_errors:
            result = out if numel == summand.numel() else torch.empty_like(summand)
        if levels is None:
            await self._sum_over(self._group, summand, result, keeps_errors=keeps_errors)
        else:
            ranks, rank = levels.inside.size(), levels.inside.rank()
            rows, results = summand.view(ranks, -1), result.view(ranks, -1)
            await reduce_scatter(rows[rank], summand, group=levels.inside)
            await self._sum_over(levels.between, rows[rank], results[rank], keeps_errors=keeps_errors)
            if keeps_errors:
                # The errors of the other parts are made by the other ranks of the machine.
                rows[:rank].zero_()
                rows[rank + 1 :].zero_()
            await all_gather(result, results[rank], group=levels.inside)
        if keeps_errors and not is_whole:
            values.copy_(summand[:given])
        if result is not out:
            out.copy_(result[:numel])

    async def _sum_over(self, group: dist.ProcessGroup, values: Tensor, out: Tensor, *, keeps_errors: bool) -> None:
        """The sum over one level, of ``values`` with at most one short part."""
        codec, ranks, rank, device = self.codec, group.size(), group.rank(), values.device
        encode = codec.subtract_rows if keeps_errors else codec.encode_rows
        own = values[rank * codec.numel : (rank + 1) * codec.numel]
        sent, received = torch.empty(2, ranks, codec.message_bytes, dtype=torch.uint8, device=device).unbind()
        if has_streams(device):
            # All parts are encoded and decoded at once, this rank's, too, whose own summand then replaces what was
            # decoded.
            summand = own.clone() if keeps_errors else own
            encode(values.view(ranks, -1), sent, self._generator)
            await all_to_all(received, sent, group=group)
            summands = torch.empty(ranks, codec.numel, dtype=torch.float32, device=device)
            codec.decode_rows(received, summands)
            summands[rank].copy_(summand)
            torch.sum(summands, dim=0, out=own)
        else:
            # Only messages for others. Starting with the next rank spreads the senders over the receivers.
            others = slice(rank + 1, ranks), slice(0, rank)
            for some in others:
                for parts, theirs in self._parts(values, some):
                    encode(parts, sent[theirs], self._generator)
            await all_to_all(received, sent, group=group)
            for some in others:
                codec.add_rows(received[some], own)
        encode(own[None], received[rank : rank + 1], self._generator)
        await all_gather(received.view(-1), received[rank], group=group)
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
