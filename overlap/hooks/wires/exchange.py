"""A sum over ranks by messages that a wire encodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from overlap._torch.device import Workspace, has_streams
from overlap.hooks.collectives import Operation, all_gather, all_to_all, reduce_scatter
from overlap.hooks.stage import Plan, follow
from overlap.hooks.wires.codec import Fields, Wire
from overlap.ranks.machines import Levels

_NOTHING = torch.empty(0, device="cpu")


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
        self._levels = levels
        self._group = group if levels is None else levels.between
        """Of the ranks that send messages to each other."""
        self._messages = Workspace()
        # Of one sum.
        self._values = self._out = self._summand = self._result = _NOTHING
        self._keeps_errors = False

    async def __call__(self, values: Tensor, *, out: Tensor) -> None:
        """Write the sum of ``values`` over ranks to ``out``, the same on all ranks bit for bit.

        Args:
            values: this rank's summand, fp32 of shape ``(numel,)``, or ``(padded_numel,)`` with zeros at its end, which
                saves a copy; overwritten with the rounding errors that this rank made, in its messages and in the sum
                of its own part. Their sum over ranks is the error of the result.
            out: of shape ``(numel,)``; may be ``values`` itself, and then the rounding errors are not computed.

        One rank alone rounds nothing.
        """
        await follow(self.plan(lambda: (values, out)))

    def plan(self, tensors: Callable[[], tuple[Tensor, Tensor]]) -> Plan:
        """The same as a plan, one sum at a time; ``tensors()``, called when it begins, returns ``values`` and
        ``out``."""
        if self.padded_numel == self.codec.numel:
            return (partial(self._leave, tensors),)
        return partial(self._begin, tensors), self._encode, self._add, self._decode, self._end

    def _leave(self, tensors: Callable[[], tuple[Tensor, Tensor]]) -> None:
        """One rank alone, or no values."""
        values, out = tensors()
        if values is not out:
            out.copy_(values[: out.numel()])
            values.zero_()

    def _begin(self, tensors: Callable[[], tuple[Tensor, Tensor]]) -> Operation | None:
        self._values, self._out = values, out = tensors()
        self._keeps_errors = out is not values
        given, padded_numel = values.numel(), self.padded_numel
        # One part may be short, which saves a copy, but none may be missing.
        can_be_short = self._levels is None and not has_streams(values.device)
        is_whole = given >= padded_numel - (self.codec.numel if can_be_short else 0)
        self._summand = summand = values if is_whole else pad(values, (0, padded_numel - given))
        self._result = summand
        if self._keeps_errors:
            self._result = out if out.numel() == summand.numel() else torch.empty_like(summand)
        if self._levels is None:
            return None
        return reduce_scatter(self._at_one_level(summand), summand, group=self._levels.inside)

    def _at_one_level(self, whole: Tensor) -> Tensor:
        """The part of ``whole`` that ranks sum by messages, with at most one short part."""
        inside = None if self._levels is None else self._levels.inside
        return whole if inside is None else whole.view(inside.size(), -1)[inside.rank()]

    def _encode(self) -> Operation:
        codec, ranks, rank, device = self.codec, self._group.size(), self._group.rank(), self._summand.device
        if not self._messages.take():
            messages = self._messages.make(2, ranks, codec.message_bytes, dtype=torch.uint8, device=device)
            sent, received = messages.unbind()
            self._to_owners = all_to_all(received, sent, group=self._group)
            self._to_all = all_gather(received.view(-1), received[rank], group=self._group)
            fields = codec.fields_in(messages)
            self._fields_sent, self._fields_received = (tuple(field[way] for field in fields) for way in range(2))
            self._fields_own = _some(self._fields_received, slice(rank, rank + 1))
        values = self._at_one_level(self._summand)
        encode = codec.subtract_rows if self._keeps_errors else codec.encode_rows
        self._own = own = values[rank * codec.numel : (rank + 1) * codec.numel]
        if has_streams(device):
            # All parts are encoded and decoded at once, this rank's, too, whose own summand then replaces the decoded
            # one.
            self._own_summand = own.clone() if self._keeps_errors else own
            encode(values.view(ranks, -1), self._fields_sent, self._generator)
        else:
            # Only messages for others. Starting with the next rank spreads the senders over the receivers.
            for some in (slice(rank + 1, ranks), slice(0, rank)):
                for parts, theirs in self._parts(values, some):
                    encode(parts, _some(self._fields_sent, theirs), self._generator)
        return self._to_owners

    def _add(self) -> Operation:
        codec, ranks, rank, own = self.codec, self._group.size(), self._group.rank(), self._own
        if has_streams(own.device):
            summands = torch.empty(ranks, codec.numel, dtype=torch.float32, device=own.device)
            codec.decode_rows(self._fields_received, summands)
            summands[rank].copy_(self._own_summand)
            torch.sum(summands, dim=0, out=own)
        else:
            for some in (slice(rank + 1, ranks), slice(0, rank)):
                codec.add_rows(_some(self._fields_received, some), own)
        encode = codec.subtract_rows if self._keeps_errors else codec.encode_rows
        encode(own[None], self._fields_own, self._generator)
        return self._to_all

    def _decode(self) -> Operation | None:
        for parts, theirs in self._parts(self._at_one_level(self._result), slice(0, self._group.size())):
            self.codec.decode_rows(_some(self._fields_received, theirs), parts)
        self._messages.give_back()
        if self._levels is None:
            return None
        inside = self._levels.inside
        if self._keeps_errors:
            # The errors of the other parts are made by the other ranks of the machine.
            rows, rank = self._summand.view(inside.size(), -1), inside.rank()
            rows[:rank].zero_()
            rows[rank + 1 :].zero_()
        return all_gather(self._result, self._at_one_level(self._result), group=inside)

    def _end(self) -> None:
        values, out, summand, result = self._values, self._out, self._summand, self._result
        if self._keeps_errors and summand is not values:
            values.copy_(summand[: values.numel()])
        if result is not out:
            out.copy_(result[: out.numel()])
        self._values = self._out = self._summand = self._result = self._own = self._own_summand = _NOTHING

    def _parts(self, values: Tensor, ranks: slice) -> Iterator[tuple[Tensor, slice]]:
        """Views ``(n, part)`` of the parts of ``ranks``, and their ranks; the last rank's may be short."""
        part = self.codec.numel
        end = min(ranks.stop, values.numel() // part)
        if ranks.start < end:
            yield values[ranks.start * part : end * part].view(-1, part), slice(ranks.start, end)
        if max(ranks.start, end) < ranks.stop:
            yield values[None, end * part :], slice(end, ranks.stop)


def _some(fields: Fields, messages: slice) -> Fields:
    return tuple(field[messages] for field in fields)
