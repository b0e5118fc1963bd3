"""What a stage remembers of one backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from overlap.errors import TrainingLoopError
from overlap.hooks import Bucket
from overlap.optim.clipping import SealedGradients
from overlap.optim.zero.bucket_shards import BucketShards
from overlap.optim.zero.sharding import Shard

__all__ = ["PARTLY_UPDATED", "Pairs", "Pass"]

Pairs = list[tuple[Shard, Tensor]]
"""Shards, each with the gradient of what this rank owns of it."""

PARTLY_UPDATED = (
    "some parameters may have been updated by then, and not gathered on every rank: load a checkpoint before going on, "
    "or use ZeroStep(zero, deferred=True), which updates all or none"
)


@dataclass
class Pass:
    """One backward pass: its buckets, and which gradients it reduced."""

    is_replay: bool = False
    is_open: bool = False
    reduced: dict[int, Tensor] = field(default_factory=dict)
    """The parameters of all buckets so far, by ``id``."""
    _buckets: list[tuple[Bucket, BucketShards]] = field(default_factory=list)
    _is_due: bool = True
    _sealed: SealedGradients | None = None
    _held: dict[int, Pairs] = field(default_factory=dict)

    def note(self, bucket: Bucket, shards: BucketShards | None) -> None:
        """Take note of a bucket and its shards."""
        self.reduced.update((id(parameter), parameter) for parameter in bucket.parameters)
        if shards is not None:
            # Without DDP's objects, which are invalid after the pass.
            bare = replace(bucket, buffer=bucket.buffer.new_empty(0), raw=None, views=())
            self._buckets.append((bare, shards))

    def hold(self, bucket: Bucket, pairs: Pairs) -> None:
        """Keep the gradients to apply to the bucket's shards."""
        self._held[bucket.index] = pairs

    def of(self, bucket: Bucket) -> Pairs:
        """Take the gradients held for one bucket."""
        return self._held.pop(bucket.index, [])

    def all_held(self) -> Pairs:
        """Take the gradients held for all buckets."""
        held, self._held = self._held, {}
        return [pair for pairs in held.values() for pair in pairs]

    def close(self) -> None:
        """All buckets have come."""
        self.is_open = False

    def take_replay(self) -> bool:
        """Whether this was a replay and its step has not been made yet; true only once."""
        due, self._is_due = self.is_replay and self._is_due, False
        return due

    def buckets(self) -> list[tuple[Bucket, BucketShards]]:
        """Buckets with their shards as the next forward needs them: the last bucket has the first layers."""
        return list(reversed(self._buckets))

    def late_pairs(self, shards: Iterable[Shard]) -> Pairs:
        """The gradients that ``step()`` applies: parts of ``.grad``, or those held on a rank that replays."""
        if self.is_replay:
            return self.all_held()
        return [
            (shard, shard.gradient())
            for shard in shards
            if shard.own is not None and shard.parameter.grad is not None and id(shard.parameter) in self.reduced
        ]

    def check_complete(self, names: Mapping[Tensor, str]) -> None:
        """Raises: TrainingLoopError: backward ended before all buckets came."""
        if not self.is_open:
            return
        missing = [name for parameter, name in names.items() if id(parameter) not in self.reduced]
        raise TrainingLoopError(
            f"backward has not reached every parameter: no gradient for some of {', '.join(missing[:5])}"
            f"{', ...' if len(missing) > 5 else ''}; use DistributedDataParallel(find_unused_parameters=True) "
            "if part of the model takes no part in the loss"
        )

    def check_reduced(self, shards: Iterable[Shard], names: Mapping[Tensor, str]) -> None:
        """Raises: TrainingLoopError: a gradient is this rank's own, not the mean."""
        local = [
            names.get(shard.parameter, shard.name)
            for shard in shards
            if shard.parameter.grad is not None and id(shard.parameter) not in self.reduced
        ]
        if local:
            raise TrainingLoopError(
                f"step() would leave out gradients that were not reduced over ranks ({local[0]} and {len(local) - 1} "
                "others): the backward ran under no_sync()"
            )

    def seal(self) -> None:
        """Remember ``.grad`` as it was applied: a later change would be lost."""
        self._sealed = SealedGradients()
        self._sealed.seal(self.reduced.values())

    def check_unchanged(self, names: Mapping[Tensor, str]) -> None:
        """Raises: TrainingLoopError: ``.grad`` was changed after backward had applied it."""
        if self._sealed is None:
            return
        changed = [p for p in self.reduced.values() if p.grad is not None and not self._sealed.holds(p)]
        if changed:
            raise TrainingLoopError(
                f"the gradient of {names.get(changed[0], 'a parameter')} (and of {len(changed) - 1} others) was "
                "changed between backward and zero.step(), but the update had been made in backward; clipping, "
                "GradScaler.unscale_ and other edits need ZeroStep(zero, deferred=True)"
            )
