"""The buckets of a late pass, as one. See [Note: nothing to hide] in :mod:`overlap.hooks.engine.nothing_to_hide`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from overlap._torch.foreach import copy_all, flattened
from overlap.hooks import Bucket

__all__ = ["LateBuckets", "Together"]


@dataclass(frozen=True)
class Together:
    """Buckets of one dtype, copied into one, which has all of their parameters."""

    bucket: Bucket
    _buffers: Sequence[Tensor]

    @classmethod
    def of(cls, buckets: Sequence[Bucket]) -> Together:
        buffers = [bucket.buffer for bucket in buckets]
        whole = replace(
            buckets[0],
            is_last=buckets[-1].is_last,
            buffer=flattened(buffers),
            parameters=tuple(parameter for bucket in buckets for parameter in bucket.parameters),
            fqns=_joined([bucket.fqns for bucket in buckets]),
            raw=None,
            gradients_of=None,
            views=None,
            owned=None,
        )
        return cls(whole, buffers)

    def put_back(self) -> None:
        """Copy what was made of the gradients to where they came from, from which DDP sets ``.grad``."""
        copy_all(self._buffers, self.bucket.buffer.split_with_sizes([buffer.numel() for buffer in self._buffers]))


def _joined(names: Sequence[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    known = [each for each in names if each is not None]
    return tuple(name for each in known for name in each) if len(known) == len(names) else None


class LateBuckets:
    """Collects the buckets of a late pass, to exchange and update them at once."""

    def __init__(self) -> None:
        self._arrived: list[Bucket] = []

    def clear(self) -> None:
        """A pass begins."""
        self._arrived = []

    def add(self, bucket: Bucket) -> None:
        """``bucket`` has come."""
        self._arrived.append(bucket)

    def take(self) -> Iterator[Together]:
        """All that have come, those of each dtype together; nothing the second time."""
        arrived, self._arrived = self._arrived, []
        by_dtype: defaultdict[torch.dtype, list[Bucket]] = defaultdict(list)
        for bucket in arrived:
            by_dtype[bucket.buffer.dtype].append(bucket)
        for buckets in by_dtype.values():
            yield Together.of(buckets)
