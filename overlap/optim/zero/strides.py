"""Brings the state into the order of parameters whose memory format was changed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from overlap.optim.zero.sharding import Shard, flatten
from overlap.optim.zero.state import ShardedState, is_by_element

__all__ = ["follow_strides"]


@torch.no_grad()
def follow_strides(sharded: ShardedState) -> None:
    """Exchange state and masters, so that each rank has those of the elements that it owns in the new order.

    Call it on every rank. Issues: nothing if no parameter's strides have changed; else one gather for each of those.
    """
    for shard in sharded.shards.values():
        if shard.is_permuted:
            _follow(sharded, shard)


def _follow(sharded: ShardedState, shard: Shard) -> None:
    old = shard.strides
    mine = {key: value for key, value in sharded.of(shard).items() if is_by_element(shard, key, value)}
    shard.follow()
    if shard.is_whole:
        return
    gathered: list[dict[str, Tensor]] = [{}] * sharded.process_group.size()
    dist.all_gather_object(gathered, {k: v.detach().cpu().clone() for k, v in mine.items()}, sharded.process_group)
    start, end = shard.range
    for key, value in mine.items():
        flat = torch.empty(shard.parameter.numel(), dtype=value.dtype)
        for parts, (first, last) in zip(gathered, shard.ranges, strict=True):
            flat[first:last] = parts[key]
        whole = torch.empty_like(shard.parameter, dtype=value.dtype, device="cpu", requires_grad=False)
        value.copy_(flatten(whole.copy_(flat.as_strided(whole.size(), old)))[start:end])
