"""Gradients sent to their owners through a wire: a reduce-scatter in few bytes.

Each rank encodes, for every other rank, the part of a bucket that this one owns, and sends it as one message. The owner
decodes what it receives and sums in fp32, in the order of ranks, with its own part as it is. So a gradient is rounded
once on its way, where an all-reduce through a wire rounds twice (ZeRO++'s qgZ, https://arxiv.org/abs/2306.10209, sends
directly for the same reason).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.foreach import copy_all, subtract_from_
from overlap.hooks import Bucket, all_reduce, send_recv
from overlap.hooks.finite import all_finite
from overlap.hooks.wires import ErrorFeedback, Wire
from overlap.hooks.wires.blocks import codecs_in_runs
from overlap.hooks.wires.memory import WireMemory
from overlap.optim.zero.shards import BucketShards, beginning, beginnings

__all__ = ["WireReduce"]


@dataclass(frozen=True)
class WireReduce:
    """Makes what this rank owns of a bucket the mean over ranks."""

    wire: Wire
    memory: WireMemory

    async def __call__(self, bucket: Bucket, shards: BucketShards) -> None:
        """Change ``bucket.buffer``: the mean where this rank owns it, elsewhere this rank's own gradient, divided.

        Parameters that are not sharded are divided and left alone.

        Issues: a send and a receive of one message with every other rank; with error feedback one all-reduce of a
        number.
        """
        feedback = self.memory.feedback
        # As in DDP, each rank divides before the sum.
        values = bucket.buffer.to(torch.float32, copy=feedback is not None).mul_(1 / bucket.divisor)
        if values is not bucket.buffer:
            bucket.buffer.mul_(1 / bucket.divisor)
        if shards.layout.packed_numel == 0:
            return
        names, errors = _by_name(bucket, shards, values) if feedback is not None else ((), ())
        if feedback is not None:
            feedback.add_to(names, errors)
        pieces = shards.by_rank(shards.cut_flat(values))
        mean = await self._sum(bucket, shards, pieces)
        own = shards.own_of(shards.cut_flat(bucket.buffer))
        copy_all(own, beginning(mean, own))
        if feedback is not None:
            # What rounding the mean to the gradients' dtype loses is not delivered either.
            copy_all(pieces[shards.rank], own)
            subtract_from_(pieces[shards.rank], beginning(mean, own))
            await _hold(feedback, bucket, names, errors, own)

    def note(self, mean: Tensor) -> None:
        """Gradients that do not go through the wire came out as ``mean``: a pass in which they are not finite is not
        applied either, so it may not change the memory."""
        if self.memory.feedback is not None:
            self.memory.feedback.note(mean)

    async def _sum(self, bucket: Bucket, shards: BucketShards, pieces: Sequence[Sequence[Tensor]]) -> Tensor:
        """The sum of this rank's part, fp32, packed; with error feedback the other parts of ``pieces``, which are given
        by rank, become what was left out of them."""
        device, rank = bucket.buffer.device, shards.rank
        generator = self.memory.generator_for(self.wire, rank, device)
        codecs = [self.wire.codec(numel) if numel else None for numel in shards.layout.owned_numels]
        # Starting with the next rank spreads the senders over the receivers.
        peers = [(rank + distance) % len(codecs) for distance in range(1, len(codecs))]
        sends: list[tuple[Tensor, int]] = []
        for codec, alike in codecs_in_runs(codecs, peers, device):
            messages = torch.empty(len(alike), codec.message_bytes, dtype=torch.uint8, device=device)
            parts = [pieces[peer] for peer in alike]
            summands = _packed(parts, codec.numel, device)
            sends += zip(messages, alike, strict=True)
            if self.memory.feedback is None:
                codec.encode_rows(summands, messages, generator)
            else:
                codec.subtract_rows(summands, messages, generator)
                copy_all(list(chain.from_iterable(parts)), beginnings(summands, parts))
        own_codec = codecs[rank]
        if own_codec is None:
            await send_recv(sends, [], group=bucket.group, label="reduce_scatter")
            return torch.empty(0, device=device)
        received = torch.empty(len(codecs), own_codec.message_bytes, dtype=torch.uint8, device=device)
        receives = [(received[peer], peer) for peer in peers]
        await send_recv(sends, receives, group=bucket.group, label="reduce_scatter")
        own = _packed([pieces[rank]], own_codec.numel, device)[0]
        total = own
        if rank:
            total = torch.empty_like(own)
            own_codec.decode(received[0], total)
            own_codec.add_rows(received[1:rank], total)
            total.add_(own)
        own_codec.add_rows(received[rank + 1 :], total)
        return total


def _by_name(bucket: Bucket, shards: BucketShards, values: Tensor) -> tuple[list[str], list[Tensor]]:
    """The sharded parameters' names, and views of ``values`` in their shapes."""
    views = bucket.with_buffer(values).gradients
    return list(compress(bucket.names, shards.are_sharded)), list(compress(views, shards.are_sharded))


async def _hold(
    feedback: ErrorFeedback, bucket: Bucket, names: Sequence[str], errors: Sequence[Tensor], own: Sequence[Tensor]
) -> None:
    """Hold ``errors``; each rank sees only its part of the result, so ranks ask each other whether all is finite."""
    are_finite = torch.stack([all_finite(piece) for piece in own]).all() if own else None
    verdict = torch.zeros((), device=bucket.buffer.device)
    if are_finite is not None:
        verdict = torch.where(are_finite, verdict, math.inf)
    await all_reduce(verdict, op=dist.ReduceOp.SUM, group=bucket.group)
    feedback.hold(names, errors, verdict)


def _packed(pieces: Sequence[Sequence[Tensor]], numel: int, device: torch.device) -> Tensor:
    """A row of ``numel`` values for each of ``pieces``: one after another, with zeros at the end."""
    rows = torch.empty(len(pieces), numel, dtype=torch.float32, device=device)
    rows[:, min(sum(piece.numel() for piece in own) for own in pieces) :].zero_()
    copy_all(beginnings(rows, pieces), list(chain.from_iterable(pieces)))
    return rows
