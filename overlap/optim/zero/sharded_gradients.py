"""What the ranks find out together about gradients of which each has a part: whether all are finite.

[Note: one verdict]

``GradScaler`` looks at ``.grad`` on its own rank, and all ranks must reach the same verdict, or their scales drift
apart. But after a reduce-scatter only the owner of a chunk holds its mean. So the ranks vote, and each rank that learns
of a non-finite gradient elsewhere marks one element of a part that it does not own, where no update reads ``.grad``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.device import has_streams
from overlap.hooks import Bucket, all_reduce, whole_pass
from overlap.hooks.finite import LargestElements
from overlap.optim.zero.sharding import Shard

__all__ = ["FiniteVote"]


class FiniteVote:
    """Whether all gradients of a backward pass are finite, on any rank. See [Note: one verdict]."""

    def __init__(self) -> None:
        self._largest = LargestElements()
        self._verdict: Tensor | None = None

    def begin(self) -> None:
        """A new pass begins."""
        self._largest.clear()
        self._verdict = None

    def look(self, gradients: Sequence[Tensor]) -> None:
        """Take note of averaged gradients."""
        self._largest.look(gradients)

    async def cast(self, bucket: Bucket) -> None:
        """After the last bucket is reduced, ask the other ranks. Issues: one all-reduce of a number."""
        await whole_pass()
        if not bucket.is_last:
            return
        verdict = self._largest.found_inf(bucket.buffer.device)
        await all_reduce(verdict, op=dist.ReduceOp.MAX, group=bucket.group)
        self._verdict = verdict

    @torch.no_grad()
    def tell(self, shards: Iterable[Shard]) -> None:
        """Mark ``.grad`` if a gradient is not finite on any rank; on an accelerator the host does not wait."""
        verdict = self._verdict
        if verdict is None or (not has_streams(verdict.device) and not verdict.item()):
            return
        for shard in shards:
            grad = shard.parameter.grad
            others = shard.foreign_element()
            if grad is None or others is None or grad.stride() != shard.parameter.stride():
                continue
            element = grad.as_strided((1,), (1,), int(grad.storage_offset()) + others)
            element.copy_(torch.where(verdict > 0, float("inf"), element))
            return
