"""The sharded update of each bucket while backward goes on."""

from __future__ import annotations

from torch import Tensor

from overlap.hooks import Bucket, all_reduce, whole_pass
from overlap.hooks.transforms.clip import Clipping, ShardedNorm, in_model_order
from overlap.optim.lifecycle import UpdateLifecycle
from overlap.optim.veto import Veto
from overlap.optim.zero.bucket_shards import BucketShards, ShardsByBucket
from overlap.optim.zero.exchange import Exchange, Gather
from overlap.optim.zero.optimizer import ZeroRedundancyOptimizer
from overlap.optim.zero.sharded_gradients import FiniteVote
from overlap.optim.zero.sharding import Shard, flatten, raise_versions_of
from overlap.optim.zero.used_shards import UsedShards

__all__ = ["BackwardUpdate", "Pairs"]

Pairs = list[tuple[Shard, Tensor]]
"""Shards with the gradients of what this rank owns of them."""


class BackwardUpdate:
    """Reduces each bucket of a backward, and updates and gathers it unless that is left for later.

    Args:
        zero: the optimizer.
        exchange: how ranks exchange gradients and parameters.
        lifecycle: of the update.
        clipping: how to clip what is updated with the last bucket; ``None``: not.
        is_deferred: whether all buckets are updated at once.
        gathers_later: whether parameters are gathered when backward is over.
    """

    def __init__(
        self,
        zero: ZeroRedundancyOptimizer,
        exchange: Exchange,
        lifecycle: UpdateLifecycle,
        *,
        clipping: Clipping | None,
        is_deferred: bool,
        gathers_later: bool,
    ) -> None:
        self.zero = zero
        self.exchange = exchange
        self.lifecycle = lifecycle
        self.clipping = clipping
        self.is_deferred = is_deferred
        self.gathers_later = gathers_later
        self.finds_unused: bool | None = None
        """Whether DDP looks for unused parameters; ``None`` where that is not known."""
        self.follows_its_reducer = False
        """Whether a :class:`ReduceScatter` of this optimizer comes before the stage."""
        self.has_whole_mean = False
        """Whether a reducer before the stage has left the mean in all of ``.grad``."""
        # DDP's first backward has one bucket of all parameters; its large buffers are not kept for smaller ones.
        self.shards = ShardsByBucket([zero.ownership], before_new=zero.exchange.workspace.trim)
        self.used = UsedShards()
        self._vote = FiniteVote()
        # Of the last backward: its buckets in their order, and what is to be applied to the shards of each.
        self.gathers: list[Gather] = []
        self._held: dict[int, Pairs] = {}
        # The whole means, by parameter, where they are to be clipped without a .grad of them.
        self._whole: dict[Tensor, Tensor] = {}

    def begin(self) -> None:
        """A backward begins."""
        self.gathers, self._held, self._whole = [], {}, {}
        self._vote.begin()

    async def run(self, bucket: Bucket) -> None:
        """Do with ``bucket`` what is not left for later."""
        shards = self.shards.of(bucket)
        self.has_whole_mean = bucket.is_mean and not self.follows_its_reducer
        self.lifecycle.gradients.note_reduced(bucket.parameters)
        if shards is not None:
            self.gathers.append(Gather(index=bucket.index, step=bucket.step, shards=shards))
            await self._exchange_gradients(bucket, shards)
        elif not bucket.is_mean:
            await self.exchange.average(bucket)
        if self.lifecycle.leaves_update:
            if not self.has_whole_mean:
                await self._vote.cast(bucket)
            return
        if self.is_deferred:
            await self._update_together(bucket)
        else:
            self.update(self._held.pop(bucket.index, []), self.lifecycle.veto)
        if shards is not None:
            self.lifecycle.gradients.note_applied(shard.parameter for shard in shards)
            if not self.lifecycle.veto.stops:
                raise_versions_of(shards)
            # There is nothing new after a step that was left out; through a wire, rounding of earlier ones would go.
            if not (self.gathers_later or self.lifecycle.veto.stops):
                await self.exchange.gather(shards, bucket.group)

    async def _exchange_gradients(self, bucket: Bucket, shards: BucketShards) -> None:
        if not bucket.is_mean:
            await self.exchange.reduce(bucket, shards)
        used = await self.used.of(
            bucket,
            shards,
            self.finds_unused,
            in_step=self.lifecycle.leaves_update,
            is_joining=self.lifecycle.is_joining(),
        )
        kept = {id(shard) for shard, is_used in zip(shards, used, strict=True) if is_used}
        gradients = shards.gradients(bucket.buffer)
        pairs = [pair for pair in zip(shards.owned, gradients, strict=True) if id(pair[0]) in kept]
        if self.lifecycle.leaves_update:
            self._vote.look([gradient for _, gradient in pairs])
        if self.lifecycle.leaves_update and not bucket.is_replay:
            pairs = []  # step() applies .grad.
        elif self.clipping is not None and self.has_whole_mean:
            used_ids = {id(shard.parameter) for shard in shards if id(shard) in kept}
            whole = {p: g for p, g in zip(bucket.parameters, bucket.gradients, strict=True) if id(p) in used_ids}
            if self.lifecycle.leaves_update:
                whole = {parameter: gradient.clone() for parameter, gradient in whole.items()}
            self._whole.update(whole)
            pairs = [(shard, flatten(whole[shard.parameter])[slice(*shard.range)]) for shard, _ in pairs]
        elif self.lifecycle.leaves_update:
            # DDP sets no .grad on a rank that replays, and its buffers are gone afterwards.
            pairs = [(shard, gradient.clone()) for shard, gradient in pairs]
        self._held[bucket.index] = pairs

    async def _update_together(self, bucket: Bucket) -> None:
        await whole_pass()
        if bucket.is_last:
            pairs = self.take_held()
            if self.clipping is not None and self.has_whole_mean:
                self.clipping.clip_(self.take_whole())
            elif self.clipping is not None:
                gradients = [gradient for _, gradient in pairs]
                norm = ShardedNorm(self.clipping, gradients, self.zero.ownership.trained, bucket.buffer.device)
                await all_reduce(norm.partial, op=norm.op, group=bucket.group)
                norm.clip_()
            self.update_at_once(pairs, self.lifecycle.veto)
        await whole_pass()

    def update(self, pairs: Pairs, veto: Veto) -> None:
        """Step what this rank owns, unless ``veto`` stops it."""
        if not veto.stops:
            self.zero.update(pairs, veto)

    def update_at_once(self, pairs: Pairs, veto: Veto) -> None:
        """Step all that this rank owns, and end the step, unless ``veto`` stops it."""
        self.update(pairs, veto)
        self.end_step(veto)

    def end_step(self, veto: Veto) -> None:
        """End a step that ``veto`` has not stopped: no part of it follows."""
        if not veto.stops:
            self.zero.finish()

    def take_held(self) -> Pairs:
        """What is to be applied of the last backward, on a rank that has no ``.grad`` of it; empty the second time."""
        held, self._held = self._held, {}
        return [pair for pairs in held.values() for pair in pairs]

    def take_whole(self) -> list[Tensor]:
        """The whole gradients behind :meth:`take_held`, in the model's order; kept after a reducer, to be clipped."""
        whole, self._whole = self._whole, {}
        return [whole[parameter] for parameter in in_model_order(whole, self.lifecycle.names)]

    def tell_verdict(self) -> None:
        """Backward is over: mark ``.grad`` where a rank has found a gradient that is not finite."""
        self._vote.tell(self.zero.shards.values())
