"""The whole state in the form of the plain optimizer: put together from the ranks' parts, and divided into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from overlap.errors import ConfigurationError
from overlap.join.group_collectives import of_all_ranks, on_rank
from overlap.optim.zero.kinds import Kind, Kinds, StateValue
from overlap.optim.zero.parameter_groups import options_of
from overlap.optim.zero.partition import Range
from overlap.optim.zero.plain_values import as_plain, cloned
from overlap.optim.zero.sharding import Shard, flatten
from overlap.optim.zero.state import CPU, GlobalState, ShardedState

__all__ = ["assemble", "consolidate", "load_plain", "packed_groups"]

_BLOCK_BYTES = 16 * 2**20


def consolidate(sharded: ShardedState, to: int | None) -> dict[str, Any] | None:
    """Gather the state on rank ``to``, or on all ranks, block by block; returns ``None`` on the other ranks."""
    rank, world_size = sharded.process_group.rank(), sharded.process_group.size()
    if to is not None and not 0 <= to < world_size:
        raise ConfigurationError(
            f"consolidate_state_dict(to={to}): ranks of the group are 0 to {world_size - 1}, and None stands for all"
        )
    local = sharded.local()
    shared = local.agree()
    state: dict[Any, dict[str, Any]] = {}
    for block in _blocks(list(sharded.shards.values())):
        mine = [
            {key: (kind, as_plain(cloned(value, device=CPU))) for key, (kind, value) in local.of(shard).items()}
            if id(shard) in local.by_shard
            else None
            for _, shard in block
        ]
        group = sharded.process_group
        gathered = of_all_ranks(mine, group) if to is None else on_rank(to, mine, group)
        if gathered is None:
            continue
        for (index, shard), parts in zip(block, zip(*gathered, strict=True), strict=True):
            if any(part is not None for part in parts):
                state[index] = _of_whole(shard, parts)
    if to not in (None, rank):
        return None
    return {"state": {**state, **shared.state}, **shared.entries}


def _blocks(shards: Sequence[Shard]) -> Iterator[list[tuple[int, Shard]]]:
    block: list[tuple[int, Shard]] = []
    for index, shard in enumerate(shards):
        block.append((index, shard))
        if sum(member.parameter.nbytes for _, member in block) >= _BLOCK_BYTES:
            yield block
            block = []
    if block:
        yield block


Part = Mapping[str, tuple[Kind, Any]]
"""A rank's part of the state of a parameter, by key."""


def _of_whole(shard: Shard, parts: Sequence[Part | None]) -> dict[str, Any]:
    """The state of a whole parameter, from the parts of all ranks, ``None`` where a rank has no state of it."""
    if shard.is_whole:
        return next({key: value for key, (_, value) in part.items()} for part in parts if part is not None)
    return assemble(parts, shard.ranges, like=shard.parameter)


def assemble(parts: Sequence[Part | None], ranges: Sequence[Range], *, like: Tensor) -> dict[str, Any]:
    """The state of a parameter that was cut, from the parts of all ranks, which have the elements in ``ranges``.

    Args:
        parts: ``None`` where a rank has no state of it.
        ranges: of elements in the order of the memory of ``like``.
        like: has the parameter's shape and strides.
    """
    present = [part for part in parts if part is not None]
    assembled: dict[str, Any] = {}
    keys = {key: None for part in present for key in part}
    for key in keys:
        kind, first = next(part[key] for part in present if key in part)
        if kind is Kind.BY_PARAMETER:
            assembled[key] = first
            continue
        whole = torch.empty_like(like, dtype=first.dtype, device=CPU, requires_grad=False)
        flat = flatten(whole)
        for part, (start, end) in zip(parts, ranges, strict=True):
            if start < end:
                assert part is not None, "the ranks have agreed that it is there"
                flat[start:end] = part[key][1]
        assembled[key] = whole
    return assembled


def packed_groups(param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups as ``state_dict()`` has them: places for parameters, and plain values."""
    packed: list[dict[str, Any]] = []
    index = 0
    for group in param_groups:
        count = len(group["params"])
        others = {key: as_plain(value) for key, value in group.items() if key != "params"}
        packed.append({**others, "params": list(range(index, index + count))})
        index += count
    return packed


def load_plain(
    sharded: ShardedState, state_dict: Mapping[str, Any], *, dtypes: Sequence[torch.dtype | None] = ()
) -> None:
    """Load this rank's part of a state in the form of the plain optimizer.

    ``dtypes`` are those in which the parameters were stepped, in the order of the groups, if that is known.
    """
    if not {"state", "param_groups"} <= set(state_dict):
        hint = "; state_dict() is empty on ranks to which it was not consolidated" if not state_dict else ""
        raise ConfigurationError(
            f"this is not a state_dict of an optimizer: its keys are {sorted(map(str, state_dict))}{hint}"
        )
    groups = state_dict["param_groups"]
    given = [len(group["params"]) for group in groups]
    expected = [len(group["params"]) for group in sharded.param_groups]
    if given != expected:
        raise ConfigurationError(
            f"the state_dict has groups of {given} parameters, but this ZeroRedundancyOptimizer has {expected}"
        )
    shard_of = dict(zip((k for group in groups for k in group["params"]), sharded.shards.values(), strict=True))
    of_parameters = {key: state for key, state in state_dict["state"].items() if key in shard_of}
    values = {
        key: [StateValue(shard_of[key].name, tuple(shard_of[key].parameter.shape), k, v) for k, v in state.items()]
        for key, state in of_parameters.items()
    }
    kinds = sharded.kinds([value for state in values.values() for value in state])
    states = {
        id(shard_of[key]): {value.key: _part(shard_of[key], value, kinds) for value in state}
        for key, state in values.items()
        if shard_of[key].own is not None
    }
    shared = GlobalState(
        {key: value for key, value in state_dict["state"].items() if key not in shard_of},
        {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")},
    )
    by_shard = {id(shard): dtype for shard, dtype in zip(sharded.shards.values(), dtypes, strict=False) if dtype}
    sharded.replace(states, [options_of(group) for group in groups], shared, dtypes=by_shard)


def _part(shard: Shard, value: StateValue, kinds: Kinds) -> Any:
    """This rank's part of a value of the whole parameter; a copy, since several optimizers may load the same dict."""
    if shard.is_whole or kinds.of(value) is Kind.BY_PARAMETER:
        return cloned(value.value)
    start, end = shard.range
    given: Tensor = value.value
    like_parameter = torch.empty_like(shard.parameter, dtype=given.dtype, device=given.device, requires_grad=False)
    return flatten(like_parameter.copy_(given))[start:end].clone()
