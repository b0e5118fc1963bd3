"""A sharded optimizer that one number of ranks has saved, each its own part, for another number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from overlap.errors import ConfigurationError
from overlap.optim.packed_state import Order
from overlap.optim.zero.consolidation import Part, assemble, load_plain
from overlap.optim.zero.kinds import Kind, Kinds, StateValue
from overlap.optim.zero.optimizer import ZeroRedundancyOptimizer
from overlap.optim.zero.partition import Range
from overlap.optim.zero.plain_values import fingerprint
from overlap.optim.zero.sharding import Shard
from overlap.optim.zero.state import MASTER, ShardedState

__all__ = ["joined", "load_joined"]


@dataclass(frozen=True)
class _Saved:
    """What one old rank had of one parameter."""

    range: Range
    stride: tuple[int, ...]
    is_owned: bool
    state: dict[str, Any]
    """Empty where there was none."""


def joined(zero: ZeroRedundancyOptimizer, states: Sequence[Mapping[str, Any]], order: Order) -> dict[str, Any]:
    """The whole state, in the form of the plain optimizer, of what all old ranks have saved by themselves.

    Args:
        zero: the optimizer that is going to load it.
        states: what ``own_state`` returned on each of the old ranks, in their order.
        order: the places of the parameters of ``zero`` in these states.

    Raises:
        ConfigurationError: the states do not belong together.
    """
    if any("partition" not in state for state in states):
        raise ConfigurationError("the states were saved by an earlier version: load them with as many ranks as then")
    _check_same("partition", [state["partition"] for state in states])
    _check_same("options of the groups", [state["options"] for state in states])
    of_ranks = [list(_by_parameter(state, order)) for state in states]
    by_parameter = [list(saved) for saved in zip(*of_ranks, strict=True)]
    groups = _groups(zero, states[0]["options"])
    shards = list(zero.shards.values())
    if states[0]["partition"] == "element":
        whole = _joined_parts(zero, by_parameter)
    else:
        whole = [next(one.state for one in saved if one.is_owned) for saved in by_parameter]
    masters = [[one.state[MASTER].dtype for one in saved if MASTER in one.state] for saved in by_parameter]
    beside = _beside(states)
    state = {**{index: one for index, one in enumerate(whole) if one}, **beside["state"]}
    return {
        "plain": {**beside, "state": state, "param_groups": groups},
        "dtypes": [[*found, shard.parameter.dtype][0] for found, shard in zip(masters, shards, strict=True)],
    }


def load_joined(zero: ZeroRedundancyOptimizer, state: Mapping[str, Any]) -> None:
    """Load this rank's part of what :func:`joined` returned, after the model's parameters."""
    zero.prepare_to_load()
    zero.wait()
    zero.follow_strides()
    sharded = ShardedState(zero.optim, zero.param_groups, zero.shards, zero.process_group)
    load_plain(sharded, state["plain"], dtypes=state["dtypes"])


def _by_parameter(state: Mapping[str, Any], order: Order) -> Iterator[_Saved]:
    """What one rank has saved of each parameter, in the order of the optimizer that loads it."""
    packed, chunks = state["optimizer"]["state"], itertools.count()
    groups = [
        [(shard, master, next(chunks) if shard["is owned"] else None) for shard, master in zip(*pair, strict=True)]
        for pair in zip(state["shards"], state["masters"], strict=True)
    ]
    for group, places in zip(groups, order, strict=True):
        for shard, master, chunk in (group[place] for place in places):
            found = {} if chunk is None else packed.get(chunk, {})
            own = found if master is None else {**found, MASTER: master}
            yield _Saved(tuple(shard["range"]), tuple(shard["stride"]), chunk is not None, own)


def _groups(zero: ZeroRedundancyOptimizer, options: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups in the form of ``state_dict()``, with the options that were saved."""
    index = itertools.count()
    return [
        {**given, "params": [next(index) for _ in group["params"]]}
        for group, given in zip(zero.param_groups, options, strict=True)
    ]


def _joined_parts(zero: ZeroRedundancyOptimizer, by_parameter: Sequence[Sequence[_Saved]]) -> list[dict[str, Any]]:
    """The state of each parameter, put together from the parts of all ranks."""
    shards = list(zero.shards.values())
    values = [[_values(shard, one) for one in saved] for shard, saved in zip(shards, by_parameter, strict=True)]
    kinds = Kinds(type(zero.optim).__name__, [one for ranks in values for rank in ranks for one in rank], are_cut=True)
    whole = []
    for shard, saved, of_ranks in zip(shards, by_parameter, values, strict=True):
        parts = [{value.key: (kinds.of(value), value.value) for value in rank} or None for rank in of_ranks]
        _check_parts(shard, saved, parts)
        like = torch.empty_strided(tuple(shard.parameter.shape), saved[0].stride, device="meta")
        whole.append(assemble(parts, [one.range for one in saved], like=like))
    return whole


def _values(shard: Shard, saved: _Saved) -> list[StateValue]:
    shape = (saved.range[1] - saved.range[0],)
    return [StateValue(shard.name, shape, key, value) for key, value in saved.state.items()]


def _check_parts(shard: Shard, saved: Sequence[_Saved], parts: Sequence[Part | None]) -> None:
    """Raises: ConfigurationError: a part is missing, or what belongs to the whole parameter differs."""
    for key in {key: None for part in parts if part is not None for key in part}:
        found: list[str] = []
        for rank, (one, part) in enumerate(zip(saved, parts, strict=True)):
            if part is not None and key in part:
                kind, value = part[key]
                found += [fingerprint(value)] if kind is Kind.BY_PARAMETER else []
            elif one.range[0] < one.range[1]:
                raise ConfigurationError(f"the state of old rank {rank} has no {key!r} of {shard.name}, as others have")
        _check_same(f"{key!r} of {shard.name}", found)


def _beside(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What belongs to no parameter. A rank that owned nothing has stepped nothing, so it does not count."""
    found: list[dict[str, Any]] = []
    for state in states:
        owned = sum(shard["is owned"] for shards in state["shards"] for shard in shards)
        packed = state["optimizer"]
        others = {key: value for key, value in packed["state"].items() if key not in range(owned)}
        entries = {key: value for key, value in packed.items() if key != "param_groups"}
        found += [{**entries, "state": others}] if owned else []
    _check_same("what belongs to no parameter", found)
    return found[0]


def _check_same(what: str, values: Sequence[Any]) -> None:
    """Raises: ConfigurationError: the ranks have saved different ``values``."""
    if len({fingerprint(value) for value in values}) > 1:
        raise ConfigurationError(
            f"the states of a ZeroRedundancyOptimizer do not belong together: {what} differs between the old ranks"
        )
