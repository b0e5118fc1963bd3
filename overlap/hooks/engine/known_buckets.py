"""What is the same of a bucket in every pass, found out once."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.c10d import GradBucket, bucket_gradients
from overlap.hooks.bucket import Bucket

__all__ = ["KnownBucket", "KnownBuckets"]


class KnownBucket:
    """The parameters of one of DDP's buckets as they lie in memory, and the views of their gradients."""

    def __init__(
        self, parameters: tuple[Tensor, ...], strides: list[tuple[int, ...]], fqns: tuple[str, ...] | None
    ) -> None:
        self.parameters = parameters
        self.strides = strides
        self.fqns = fqns
        self.has_right_format = False
        """Whether gradients were found to lie in the bucket as the parameters do."""
        self._views: tuple[Tensor, ...] = ()
        self._storage: torch.UntypedStorage | None = None

    def is_of(self, parameters: list[Tensor], strides: list[tuple[int, ...]]) -> bool:
        """Whether the bucket has these parameters, and they these strides."""
        return (
            len(parameters) == len(self.parameters)
            and all(map(operator.is_, parameters, self.parameters))
            and strides == self.strides
        )

    def gradients(self, raw: GradBucket) -> tuple[Tensor, ...]:
        """The gradients in ``raw``, as :func:`bucket_gradients` has them; made anew where its memory is another."""
        storage = raw.buffer().untyped_storage()
        # Kept with its views: while it lives no other storage has its address.
        if self._storage is None or storage._cdata != self._storage._cdata:
            self._storage, self._views = storage, tuple(bucket_gradients(raw))
        return self._views


class KnownBuckets:
    """DDP's buckets, by their place in the pass.

    Args:
        names: of the model's parameters, where they are known.
        group: on which the model trains.
    """

    def __init__(self, names: Mapping[Tensor, str] | None, group: dist.ProcessGroup) -> None:
        self._names = names
        self._group = group
        self._known: dict[int, KnownBucket] = {}

    def forget(self) -> None:
        """Let go of the buckets' memory."""
        self._known.clear()

    def bucket(
        self, raw: GradBucket, *, divisor: int, step: int, is_replay: bool, keeps_views: bool
    ) -> tuple[Bucket, KnownBucket]:
        """``raw`` as stages see it, and what is known of it; views of its memory are kept where ``keeps_views``."""
        index = raw.index()
        known = self._of(index, raw.parameters())
        bucket = Bucket(
            index=index,
            is_last=raw.is_last(),
            buffer=raw.buffer(),
            parameters=known.parameters,
            group=self._group,
            divisor=divisor,
            step=step,
            is_replay=is_replay,
            raw=raw,
            fqns=known.fqns,
            # DDP has other buckets after the first pass and in each replay, and these would keep their memory.
            gradients_of=known.gradients if step and keeps_views and not is_replay else None,
        )
        return bucket, known

    def _of(self, index: int, parameters: list[Tensor]) -> KnownBucket:
        strides = [parameter.stride() for parameter in parameters]
        known = self._known.get(index)
        if known is None or not known.is_of(parameters, strides):
            names = self._names
            fqns = None if names is None else tuple(names.get(parameter, "unknown") for parameter in parameters)
            known = self._known[index] = KnownBucket(tuple(parameters), strides, fqns)
        return known
