"""Letting every rank know of a gradient that is not finite.

``GradScaler`` looks at ``.grad`` of its own rank, and ranks must come to one verdict, or their scales drift apart.
But after a reduce-scatter only the owner of a chunk holds its mean. So the ranks vote, and each rank that is told of a
non-finite gradient elsewhere marks one element of a part that it does not own, where nothing reads ``.grad`` for the
update.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.foreach import norms
from overlap.hooks import Bucket, all_reduce, whole_pass
from overlap.optim.zero.shards import Shard

__all__ = ["FiniteVote"]


class FiniteVote:
    """One vote a backward pass."""

    def __init__(self) -> None:
        self._largest: list[Tensor] = []
        self._verdict: Tensor | None = None

    def begin(self) -> None:
        """A new pass begins."""
        self._largest.clear()
        self._verdict = None

    def look(self, gradients: Sequence[Tensor]) -> None:
        """Take note of averaged gradients."""
        present = [gradient for gradient in gradients if gradient.numel()]
        if present:
            self._largest.extend(norm.float() for norm in norms(present, float("inf")))

    async def cast(self, bucket: Bucket) -> None:
        """When all buckets are reduced, ask the other ranks; one all-reduce of a number."""
        await whole_pass()
        if not bucket.is_last:
            return
        largest = torch.stack(self._largest) if self._largest else torch.zeros(1, device=bucket.buffer.device)
        verdict = (~torch.isfinite(largest)).any().float()
        await all_reduce(verdict, op=dist.ReduceOp.MAX, group=bucket.group)
        self._verdict = verdict

    @torch.no_grad()
    def tell(self, shards: Iterable[Shard]) -> None:
        """Mark ``.grad`` if a gradient is not finite anywhere; without a wait of the host on an accelerator."""
        verdict = self._verdict
        if verdict is None or (verdict.device.type == "cpu" and not verdict.item()):
            return
        for shard in shards:
            grad = shard.parameter.grad
            others = shard.foreign_element()
            if grad is None or others is None or grad.stride() != shard.parameter.stride():
                continue
            element = grad.as_strided((1,), (1,), int(grad.storage_offset()) + others)
            element.copy_(torch.where(verdict > 0, float("inf"), element))
            return
