"""What the ranks find out together about gradients of which each has a part: their norm, and whether all are finite.

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
from overlap._torch.foreach import norms
from overlap.hooks import Bucket, all_reduce, whole_pass
from overlap.optim.clipping import Clipping
from overlap.optim.zero.sharding import Shard

__all__ = ["FiniteVote", "ShardedNorm"]


class ShardedNorm:
    """Clips by the global norm of gradients of which each rank has a part: local powers, a sum over ranks, a root."""

    def __init__(self, clipping: Clipping, gradients: Sequence[Tensor], device: torch.device) -> None:
        self._clipping = clipping
        # An empty part has no maximum.
        self._gradients = [gradient for gradient in gradients if gradient.numel()]
        self._is_max = clipping.norm_type == float("inf")
        each = [norm.double() for norm in norms(self._gradients, clipping.norm_type)] if self._gradients else []
        stacked = torch.stack(each) if each else torch.zeros(1, dtype=torch.float64, device=device)
        self.partial = stacked.max() if self._is_max else stacked.pow(clipping.norm_type).sum()
        """This rank's part, which the caller all-reduces in place with :attr:`op`."""

    @property
    def op(self) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.MAX if self._is_max else dist.ReduceOp.SUM

    @property
    def total(self) -> Tensor:
        """The global norm, after :attr:`partial` was all-reduced."""
        return (self.partial if self._is_max else self.partial.pow(1 / self._clipping.norm_type)).float()

    def clip_(self) -> Tensor:
        """Scale the gradients in place, after :attr:`partial` was all-reduced; returns the global norm."""
        total = self.total
        self._clipping.scale_to_(self._gradients, total)
        return total


class FiniteVote:
    """Whether all gradients of a backward pass are finite, on any rank. See [Note: one verdict]."""

    def __init__(self) -> None:
        self._largest: list[Tensor] = []
        self._verdict: Tensor | None = None

    def begin(self) -> None:
        """A new pass begins."""
        self._largest.clear()
        self._verdict = None

    def look(self, gradients: Sequence[Tensor]) -> None:
        """Take note of averaged gradients: of the largest element of each."""
        present = [gradient for gradient in gradients if gradient.numel()]
        if present:
            self._largest.extend(norm.float() for norm in norms(present, float("inf")))

    async def cast(self, bucket: Bucket) -> None:
        """After the last bucket is reduced, ask the other ranks. Issues: one all-reduce of a number."""
        await whole_pass()
        if not bucket.is_last:
            return
        largest = torch.stack(self._largest) if self._largest else torch.zeros(1, device=bucket.buffer.device)
        verdict = (~torch.isfinite(largest)).any().float()
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
