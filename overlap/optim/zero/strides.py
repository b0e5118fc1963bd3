"""Brings the state into the order of parameters whose memory format was changed."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap.join.group_collectives import of_all_ranks
from overlap.optim.zero.kinds import Kind
from overlap.optim.zero.sharding import Shard, flatten
from overlap.optim.zero.state import ShardedState

__all__ = ["follow_strides"]

_PUBLISHED = "what the parameter held"


@torch.no_grad()
def follow_strides(sharded: ShardedState) -> None:
    """Exchange state and masters, so that each rank has those of the elements that it owns in the new order.

    Call it on every rank. Issues: nothing if no parameter's strides have changed; else one gather for each of those.
    """
    permuted = [shard for shard in sharded.shards.values() if shard.is_permuted]
    if not permuted:
        return
    local = sharded.local()
    by_element = [
        {key: value for key, (kind, value) in local.of(shard).items() if kind is Kind.BY_ELEMENT}
        | ({} if shard.published is None else {_PUBLISHED: shard.published})
        for shard in permuted
    ]
    for shard, mine in zip(permuted, by_element, strict=True):
        _follow(sharded, shard, mine)


def _follow(sharded: ShardedState, shard: Shard, mine: dict[str, Tensor]) -> None:
    old = shard.strides
    shard.follow()
    if shard.is_whole:
        return
    gathered = of_all_ranks({k: v.detach().cpu().clone() for k, v in mine.items()}, sharded.process_group)
    start, end = shard.range
    for key, value in mine.items():
        flat = torch.empty(shard.parameter.numel(), dtype=value.dtype)
        for parts, (first, last) in zip(gathered, shard.ranges, strict=True):
            if first < last:
                flat[first:last] = parts[key]
        whole = torch.empty_like(shard.parameter, dtype=value.dtype, device="cpu", requires_grad=False)
        value.copy_(flatten(whole.copy_(flat.as_strided(whole.size(), old)))[start:end])
