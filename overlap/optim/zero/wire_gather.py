"""New parameters sent through a wire, as differences from the parameters that all ranks have.

An optimizer's steps are small next to the weights, so a difference keeps more in few bits than the weights would
(SDP4Bit, https://arxiv.org/abs/2410.15526; ZeRO++'s qwZ, https://arxiv.org/abs/2306.10209, sends the weights). The
owner of a part keeps its true weights beside the parameter (see :meth:`Shard.keep_true`). It encodes what the parameter
lacks of them, and every rank, the owner too, adds the same decoded message to the parameter. So parameters are equal on
all ranks bit for bit, and what rounding leaves out of one difference is in the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.foreach import add_all
from overlap.hooks import all_gather, send_recv
from overlap.hooks.wires import Wire
from overlap.hooks.wires.blocks import codecs_in_runs
from overlap.hooks.wires.memory import WireMemory
from overlap.optim.zero.shards import BucketShards, beginning, beginnings

__all__ = ["WireGather"]


@dataclass(frozen=True)
class WireGather:
    """Brings the parameters of a bucket nearer to their owners' true weights."""

    wire: Wire
    memory: WireMemory

    async def __call__(self, shards: BucketShards, group: dist.ProcessGroup, *, sends_directly: bool) -> None:
        """Change the parameters.

        Issues: a send and a receive of one message with every other rank if ``sends_directly`` or messages are of
        unequal lengths; else one all-gather.
        """
        device = shards.parameter_pieces[0].device
        codecs = [self.wire.codec(numel) if numel else None for numel in shards.layout.gathered_numels]
        lengths = [0 if codec is None else codec.message_bytes for codec in codecs]
        space = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
        messages = space.split_with_sizes(lengths)
        own = messages[shards.rank]
        if (codec := codecs[shards.rank]) is not None:
            generator = self.memory.generator_for(self.wire, shards.rank, device)
            codec.encode(_differences(shards, codec.numel, device), own, generator)
        if shards.layout.is_even and not sends_directly:
            await all_gather(space, own, group=group)
        else:
            others = [(message, rank) for rank, message in enumerate(messages) if rank != shards.rank]
            await send_recv(
                [(own, rank) for _, rank in others if own.numel()],
                [(message, rank) for message, rank in others if message.numel()],
                group=group,
                label="all_gather",
            )
        pieces = shards.by_rank(shards.parameter_pieces)
        for codec, alike in codecs_in_runs(codecs, range(len(codecs)), device):
            start, end = sum(lengths[: alike[0]]), sum(lengths[: alike[-1] + 1])
            decoded = torch.empty(len(alike), codec.numel, dtype=torch.float32, device=device)
            codec.decode_rows(space[start:end].view(len(alike), -1), decoded)
            changed = [pieces[rank] for rank in alike]
            add_all(list(chain.from_iterable(changed)), beginnings(decoded, changed))


def _differences(shards: BucketShards, numel: int, device: torch.device) -> Tensor:
    """What this rank's parts of the parameters lack of the true weights: fp32, packed, with zeros at the end."""
    differences = torch.zeros(numel, dtype=torch.float32, device=device)
    own = shards.own_of(shards.parameter_pieces)
    for shard, part in zip(shards.owning, beginning(differences, own), strict=True):
        shard.write_difference(part)
    return differences
