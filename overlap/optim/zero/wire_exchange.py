"""The exchange between owners and other ranks, with gradients or parameters sent through a wire."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from overlap.hooks import Bucket
from overlap.hooks.wires import Wire
from overlap.hooks.wires.memory import WireMemory
from overlap.optim.zero.exchange import Exchange, sum_rest
from overlap.optim.zero.shards import BucketShards
from overlap.optim.zero.wire_gather import WireGather
from overlap.optim.zero.wire_reduce import WireReduce

__all__ = ["WireExchange"]


@dataclass(frozen=True)
class WireExchange(Exchange):
    """An :class:`Exchange` one or both directions of which go through a wire."""

    wire_reduce: WireReduce | None
    """How gradients travel; in full where ``None``."""
    wire_gather: WireGather | None
    """How parameters travel; in full where ``None``."""

    @classmethod
    def beside(
        cls, exchange: Exchange, *, reduce_wire: Wire | None, gather_wire: Wire | None, memory: WireMemory
    ) -> WireExchange:
        """One that does what these wires do not do as ``exchange`` does it, in the same workspace."""
        return cls(
            exchange.sends_directly,
            exchange.workspace,
            None if reduce_wire is None else WireReduce(reduce_wire, memory),
            None if gather_wire is None else WireGather(gather_wire, memory),
        )

    async def reduce(self, bucket: Bucket, shards: BucketShards) -> None:
        if self.wire_reduce is None:
            await super().reduce(bucket, shards)
            return
        await self.wire_reduce(bucket, shards)
        await sum_rest(bucket, shards)
        for mean in shards.rest(bucket.buffer):
            self.wire_reduce.note(mean)

    async def average(self, bucket: Bucket) -> None:
        await super().average(bucket)
        if self.wire_reduce is not None:
            self.wire_reduce.note(bucket.buffer)

    async def gather(self, shards: BucketShards, group: dist.ProcessGroup) -> None:
        if self.wire_gather is None:
            await super().gather(shards, group)
            return
        if shards.layout.packed_numel:
            await self.wire_gather(shards, group, sends_directly=self.sends_directly)
            shards.note_written()
