"""Which parameters the ranks used in a pass, where DDP looks for those that none did."""

from __future__ import annotations

from collections.abc import Iterable

from overlap.hooks import Bucket
from overlap.join.active import active_join
from overlap.optim.unused import tell_used, used_on_any_rank
from overlap.optim.zero.bucket_shards import BucketShards
from overlap.optim.zero.sharding import Shard

__all__ = ["UsedShards"]


class UsedShards:
    """Which shards have a gradient on any rank, in the pass under way and, for ranks that replay, in the one before."""

    def __init__(self) -> None:
        self._before: set[int] = set()

    async def of(
        self, bucket: Bucket, shards: BucketShards, finds_unused: bool | None, *, in_step: bool, is_joining: bool
    ) -> list[bool]:
        """For each of ``shards``, whether any rank used its parameter.

        Where ``step()`` updates (``in_step``), it goes by ``.grad``, which DDP leaves ``None`` of a parameter that no
        rank used. All count here then, and only a rank without inputs, to which DDP gives no ``.grad``, waits for an
        answer.

        Issues: one all-reduce of a byte a parameter, where DDP looks for unused parameters; with ``in_step`` only under
        a ``Join``.
        """
        parameters = [shard.parameter for shard in shards]
        is_own_join = active_join(bucket.group) is not None
        if finds_unused and in_step and not bucket.is_replay and (is_own_join or not is_joining):
            if is_joining:
                await tell_used(bucket, parameters)
            return [True] * len(parameters)
        # Under PyTorch's Join a joined rank counts what the pass before used; overlap's Join counts nothing there.
        used_before = () if is_own_join else self._before
        used = await used_on_any_rank(bucket, parameters, finds_unused, used_before=used_before)
        self._before.difference_update(map(id, parameters))
        self._before.update(id(parameter) for parameter, is_used in zip(parameters, used, strict=True) if is_used)
        return used

    def note_gradients(self, shards: Iterable[Shard]) -> None:
        """The pass is over, and ``.grad`` of ``shards`` tells which were used."""
        self._before = {id(shard.parameter) for shard in shards if shard.parameter.grad is not None}
