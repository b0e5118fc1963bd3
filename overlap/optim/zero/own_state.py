"""This rank's share of a sharded optimizer, for the same rank of the same number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from overlap.errors import ConfigurationError
from overlap.optim.packed_state import Order, load_packed
from overlap.optim.zero.optimizer import ZeroRedundancyOptimizer
from overlap.optim.zero.parameter_groups import copy_options, options_of
from overlap.optim.zero.plain_values import as_plain
from overlap.optim.zero.sharding import Shard

__all__ = ["check_own_state", "load_own_state", "own_state"]


def own_state(zero: ZeroRedundancyOptimizer) -> dict[str, Any]:
    """The state of what this rank owns; waits for gathers.

    :func:`overlap.optim.zero.other_ranks.joined` makes the whole state of those of all ranks.
    """
    zero.wait()
    return {
        "partition": zero.partition,
        "optimizer": as_plain(zero.optim.state_dict()),
        "shards": [[_described(shard) for shard in shards] for shards in _shards(zero)],
        "masters": [[shard.own if shard.has_master else None for shard in shards] for shards in _shards(zero)],
        "options": [as_plain(options_of(group)) for group in zero.param_groups],
    }


def check_own_state(zero: ZeroRedundancyOptimizer, state: Mapping[str, Any], order: Order) -> None:
    """Raises: ConfigurationError: this rank owned something else when ``state`` was saved."""
    for shards, saved, places in zip(_shards(zero), state["shards"], order, strict=True):
        for shard, place in zip(shards, places, strict=True):
            then, now = saved[place], _described(shard)
            for what in now:
                if then[what] != now[what]:
                    raise ConfigurationError(
                        f"this rank's share of {shard.name} of shape {tuple(shard.parameter.shape)} is not the one "
                        f"that was saved ({what}: {then[what]} then, {now[what]} now): use the same partition, "
                        "master_dtype, gather_wire, order of parameters and memory format, or a sharded_state_dict() "
                        "of that run"
                    )


@torch.no_grad()
def load_own_state(zero: ZeroRedundancyOptimizer, state: Mapping[str, Any], order: Order) -> None:
    """Load what :func:`own_state` returned, after the model's parameters."""
    zero.prepare_to_load()
    zero.begin()
    own_order = []
    for shards, saved, masters, places in zip(_shards(zero), state["shards"], state["masters"], order, strict=True):
        owned = [place for place, then in enumerate(saved) if then["is owned"]]
        own_order.append([owned.index(place) for place in places if saved[place]["is owned"]])
        for shard, place in zip(shards, places, strict=True):
            if shard.own is not None and masters[place] is not None:
                shard.own.copy_(masters[place])
            shard.note_written()
    load_packed(zero.optim, state["optimizer"], own_order)
    for group, options in zip(zero.param_groups, state["options"], strict=True):
        group.update(options)
    copy_options(zero.param_groups, zero.optim.param_groups)


def _described(shard: Shard) -> dict[str, Any]:
    return {
        "range": list(shard.range),
        "stride": list(shard.parameter.stride()),
        "is owned": shard.own is not None,
        "master": str(shard.own.dtype) if shard.own is not None and shard.has_master else None,
    }


def _shards(zero: ZeroRedundancyOptimizer) -> Iterator[list[Shard]]:
    for group in zero.param_groups:
        yield [zero.shards[id(parameter)] for parameter in group["params"]]
