"""A rank that has run out of inputs goes on updating what it owns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import JoinHook

from overlap.optim.zero.shards import Shard, flatten

if TYPE_CHECKING:
    from overlap.optim.zero.optimizer import ZeroRedundancyOptimizer

__all__ = ["ZeroJoinHook", "lend_gradients"]


class ZeroJoinHook(JoinHook):
    """Shadows ``zero.step()``. What happens in backward needs nothing: DDP's own hook replays the stage."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self._zero = zero

    def main_hook(self) -> None:
        """The collectives of one step, as the active ranks issue them."""
        self._zero.step_joined()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Parameters are those of the last joiner now, which DDP brings to all."""


def lend_gradients(zero: ZeroRedundancyOptimizer, *, is_joined: bool) -> tuple[list[Shard], list[Tensor]]:
    """The shards to step and this rank's parts of their averaged gradients, also where this rank ``is_joined``.

    DDP sets no ``.grad`` on a rank that has run out of inputs, so the first rank that has some left broadcasts its own.

    Issues: one all-reduce of a number, one broadcast of a byte a parameter, and one broadcast a gradient.
    """
    group, device = zero.process_group, zero.join_device
    lender = torch.tensor([group.size() if is_joined else zero.rank], device=device)
    dist.all_reduce(lender, op=dist.ReduceOp.MIN, group=group)
    src = int(lender.item())
    shards = list(zero.shards.values())
    has_gradient = torch.tensor([s.parameter.grad is not None for s in shards], dtype=torch.uint8, device=device)
    dist.broadcast(has_gradient, group=group, group_src=src)
    lent = [shard for shard, flag in zip(shards, has_gradient.tolist(), strict=True) if flag]
    parts: list[Tensor] = []
    for shard in lent:
        whole = torch.empty_like(shard.parameter)
        if zero.rank == src and shard.parameter.grad is not None:
            whole.copy_(shard.parameter.grad)
        flat = flatten(whole)
        dist.broadcast(flat, group=group, group_src=src)
        start, end = shard.range
        parts.append(flat[start:end])
    return lent, parts
