"""The reduction of sharded updates as a stage of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from overlap._checks import described
from overlap._torch.optimizer import unwrapped
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks import Bucket, Role, Stage, StageContext
from overlap.hooks.wires import Wire
from overlap.optim.zero.exchange import Exchange
from overlap.optim.zero.optimizer import ZeroRedundancyOptimizer
from overlap.optim.zero.partition import check_same_group
from overlap.optim.zero.shards import BucketShards, in_elements, reduced, shards_of_bucket

__all__ = ["ReduceScatter"]


class _ShardedUpdate(Protocol):
    """What a :class:`ZeroStep` tells of its reduction."""

    zero: ZeroRedundancyOptimizer
    exchange: Exchange
    reduce_wire: Wire | None


class ReduceScatter(Stage):
    """Reduce-scatters a bucket: each rank gets the mean of what it owns of the parameters of ``zeros``.

    This is the first half of :class:`ZeroStep`, for chains in which other stages need the mean, too: transforms that
    come between, further updates. All ``zeros`` share one exchange for each bucket. A chain that begins with a
    ``ZeroStep`` gets this stage automatically where it is needed, so you rarely have to write it::

        chain(ReduceScatter(zero_muon, zero_adamw), ZeroStep(zero_muon), ZeroStep(zero_adamw)).register(ddp)

    Sets ``bucket.owned``. After it ``bucket.buffer`` holds the mean where this rank owns it, elsewhere this rank's own
    gradient divided by ``W``; parameters that none of ``zeros`` has are averaged on all ranks.

    Args:
        zeros: the optimizers; a ``ZeroStep`` of each follows in the chain.

    Communication: per bucket one reduce-scatter, and one all-reduce of the parameters that none of ``zeros`` has, if
    there are some. It sends ``N (W-1)/W`` elements of a bucket of ``N``.

    Raises:
        ConfigurationError: ``zeros`` are not different optimizers of one process group, or (at registration) the chain
            has no ``ZeroStep`` of one of them.

    >>> zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3, overlap_with_ddp=True)
    >>> chain(ReduceScatter(zero), ClipGradNorm(1.0), ZeroStep(zero))
    chain(ReduceScatter(AdamW), ClipGradNorm(1), ZeroStep(AdamW, interleaved))
    """

    role = Role.REDUCER

    def __init__(self, *zeros: ZeroRedundancyOptimizer) -> None:
        self.zeros = tuple(unwrapped(zero) for zero in zeros)
        for zero in self.zeros:
            if not isinstance(zero, ZeroRedundancyOptimizer):
                raise ConfigurationError(
                    f"ReduceScatter takes overlap.ZeroRedundancyOptimizers, got {described(zero)}; to average on every "
                    "rank use AllReduce()"
                )
        if not self.zeros:
            raise ConfigurationError("ReduceScatter takes the optimizers it reduces for: ReduceScatter(zero)")
        if len(set(map(id, self.zeros))) < len(self.zeros):
            raise ConfigurationError("ReduceScatter was given one optimizer twice; give each once")
        self.exchange = self.zeros[0].exchange
        """How ranks exchange gradients."""
        # By the index of a bucket: its parameters, the versions of the optimizers', and its shards.
        self._found: dict[int, tuple[object, object, BucketShards | None]] = {}

    @classmethod
    def of(cls, updates: Sequence[_ShardedUpdate]) -> ReduceScatter:
        """The reduction of these updates, as they would make it themselves.

        Raises:
            UnsupportedError: there are several, and one sends gradients through a wire.
        """
        made = cls(*(update.zero for update in updates))
        made.exchange = updates[0].exchange
        own = [update for update in updates if update.reduce_wire is not None]
        if own and len(updates) > 1:
            raise UnsupportedError(
                f"{own[0]!r} has its own way to send gradients, but several sharded updates share one reduction: "
                "leave its reduce_wire out, or use one ZeroRedundancyOptimizer"
            )
        return made

    @property
    def signature(self) -> str:
        return f"ReduceScatter({', '.join(f'{type(zero.optim).__name__} by {zero.partition}' for zero in self.zeros)})"

    def attach(self, context: StageContext) -> None:
        for zero in self.zeros:
            check_same_group(context.group, zero.process_group)

    def check_together(self, stages: Sequence[Stage]) -> None:
        if not any(stage is self for stage in stages):
            raise ConfigurationError(
                f"{self!r} leaves each rank a part of the mean, which a stage around it cannot know: put it into the "
                "chain itself, chain(ReduceScatter(zero), ZeroStep(zero))"
            )
        for zero in self.zeros:
            if not any(stage is zero.stage for stage in stages):
                raise ConfigurationError(
                    f"{self!r} leaves each rank its part of the mean for {type(zero.optim).__name__}, but no ZeroStep "
                    "of it follows: chain(ReduceScatter(zero), ZeroStep(zero))"
                )

    async def __call__(self, bucket: Bucket) -> None:
        bucket = in_elements(bucket)
        shards = self._shards_of(bucket)
        if shards is not None:
            await self.exchange.reduce(bucket, shards)
        else:
            await self.exchange.average(bucket)

    def passed(self, bucket: Bucket) -> Bucket:
        return reduced(bucket, self._shards_of(bucket))

    def _shards_of(self, bucket: Bucket) -> BucketShards | None:
        versions = [zero.ownership.version for zero in self.zeros]
        found = self._found.get(bucket.index)
        if found is None or found[0] is not bucket.parameters or found[1] != versions:
            # DDP's first backward has one bucket of all parameters; its large buffers are not kept for smaller ones.
            self.exchange.workspace.trim()
            shards = shards_of_bucket(bucket.parameters, [zero.ownership for zero in self.zeros])
            found = self._found[bucket.index] = bucket.parameters, versions, shards
        return found[2]

    def __repr__(self) -> str:
        return f"ReduceScatter({', '.join(type(zero.optim).__name__ for zero in self.zeros)})"
