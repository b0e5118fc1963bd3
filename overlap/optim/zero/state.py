"""The optimizer's state: this rank's part, and all of it on one rank in the form of the plain optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap.errors import ConfigurationError
from overlap.optim.zero.parameter_groups import options_of
from overlap.optim.zero.sharding import Shard, flatten

__all__ = ["ShardedState", "consolidate", "is_by_element", "load_plain"]

# The key of a parameter's master, its copy in a wider dtype.
_MASTER = "master_param"

# State that is one number per parameter in optimizers of PyTorch. For a parameter without dimensions the shape does not
# tell.
_BY_PARAMETER = ("step", "mu_product", "eta", "mu")

_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class ShardedState:
    """This rank's part of the state, and the parameters to which it belongs."""

    optimizer: Optimizer
    """The optimizer of this rank's chunks."""
    param_groups: Sequence[dict[str, Any]]
    """The groups of whole parameters."""
    shards: Mapping[int, Shard]
    """The shard of each parameter, by ``id`` of the parameter, in the groups' order."""
    process_group: dist.ProcessGroup

    def of(self, shard: Shard) -> dict[str, Any]:
        """This rank's state of one parameter, with its master if there is one."""
        if shard.own is None:
            return {}
        state = dict(self.optimizer.state.get(shard.own, {}))
        if shard.has_master:
            state[_MASTER] = shard.own
        return state

    @torch.no_grad()
    def replace(self, states: Mapping[int, dict[str, Any]], options: Sequence[Mapping[str, Any]]) -> None:
        """Replace the state of this rank's chunks, given by ``id`` of the shard, and the options of each group.

        State that is missing is made anew if the optimizer makes it at its first step.
        """
        by_chunk = {id(shard.own): shard for shard in self.shards.values() if shard.own is not None}
        packed = self.optimizer.state_dict()
        order = [chunk for group in self.optimizer.param_groups for chunk in group["params"]]
        packed["state"] = {}
        for place, chunk in enumerate(order):
            shard = by_chunk[id(chunk)]
            state = dict(states.get(id(shard), {}))
            master = state.pop(_MASTER, None)
            if master is not None and shard.has_master:
                chunk.copy_(master.view_as(chunk))
            elif shard.has_master:
                chunk.copy_(shard.shaped(shard.views[shard.rank]))
            shard.note_written()
            if state:
                packed["state"][place] = state
        for group, given in zip(packed["param_groups"], options, strict=True):
            group.update(given)
        self.optimizer.load_state_dict(packed)
        for ours, inner in zip(self.param_groups, self.optimizer.param_groups, strict=True):
            ours.update(options_of(inner))


def is_by_element(shard: Shard, key: str, value: Any) -> bool:
    """Whether a state value has one element for each element that this rank owns."""
    has_shape = isinstance(value, Tensor) and shard.own is not None and value.shape == shard.own.shape
    return has_shape and key not in _BY_PARAMETER


def consolidate(sharded: ShardedState, to: int) -> dict[str, Any] | None:
    """Gather the state on rank ``to``, block by block; returns ``None`` on the other ranks."""
    rank, world_size = sharded.process_group.rank(), sharded.process_group.size()
    if not 0 <= to < world_size:
        raise ConfigurationError(f"consolidate_state_dict(to={to}): ranks of the group are 0 to {world_size - 1}")
    state: dict[int, dict[str, Any]] = {}
    for block in _blocks(list(sharded.shards.values())):
        mine = [_on_cpu(sharded.of(shard)) for _, shard in block]
        gathered: list[Any] | None = [None] * world_size if rank == to else None
        dist.gather_object(mine, gathered, group=sharded.process_group, group_dst=to)
        if gathered is None:
            continue
        for (index, shard), parts in zip(block, zip(*gathered, strict=True), strict=True):
            if any(parts):
                state[index] = _assemble(shard, parts)
    if rank != to:
        return None
    return {"state": state, "param_groups": _packed_groups(sharded)}


def _blocks(shards: Sequence[Shard]) -> Iterator[list[tuple[int, Shard]]]:
    block: list[tuple[int, Shard]] = []
    for index, shard in enumerate(shards):
        block.append((index, shard))
        if sum(member.parameter.nbytes for _, member in block) >= _BLOCK_BYTES:
            yield block
            block = []
    if block:
        yield block


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    # Cloned, because pickling a view saves all of its memory.
    return {k: v.detach().cpu().clone() if isinstance(v, Tensor) else v for k, v in state.items()}


def _assemble(shard: Shard, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of a whole parameter, from the parts of all ranks."""
    present = [part for part in parts if part]
    if shard.is_whole:
        return dict(present[0])
    assembled: dict[str, Any] = {}
    for key, first in present[0].items():
        values = [part.get(key) for part in parts]
        if key in _BY_PARAMETER or not all(
            isinstance(value, Tensor) and value.shape == (end - start,)
            for value, (start, end) in zip(values, shard.ranges, strict=True)
        ):
            assembled[key] = first
            continue
        whole = torch.empty_like(shard.parameter, dtype=first.dtype, device="cpu", requires_grad=False)
        flat = flatten(whole)
        for value, (start, end) in zip(values, shard.ranges, strict=True):
            assert isinstance(value, Tensor), "checked above"
            flat[start:end] = value
        assembled[key] = whole
    return assembled


def _packed_groups(sharded: ShardedState) -> list[dict[str, Any]]:
    packed: list[dict[str, Any]] = []
    index = 0
    for group in sharded.param_groups:
        count = len(group["params"])
        others = {key: value for key, value in group.items() if key != "params"}
        packed.append({**others, "params": list(range(index, index + count))})
        index += count
    return packed


def load_plain(sharded: ShardedState, state_dict: Mapping[str, Any]) -> None:
    """Load this rank's part of a state in the form of the plain optimizer."""
    if not {"state", "param_groups"} <= set(state_dict):
        raise ConfigurationError(
            f"this is not a state_dict of an optimizer: its keys are {sorted(map(str, state_dict))}"
        )
    groups = state_dict["param_groups"]
    given = [len(group["params"]) for group in groups]
    expected = [len(group["params"]) for group in sharded.param_groups]
    if given != expected:
        raise ConfigurationError(
            f"the state_dict has groups of {given} parameters, but this ZeroRedundancyOptimizer has {expected}"
        )
    keys = [key for group in groups for key in group["params"]]
    states: dict[int, dict[str, Any]] = {}
    for key, shard in zip(keys, sharded.shards.values(), strict=True):
        if key in state_dict["state"] and shard.own is not None:
            states[id(shard)] = {k: _part(shard, k, v) for k, v in state_dict["state"][key].items()}
    sharded.replace(states, [options_of(group) for group in groups])


def _part(shard: Shard, key: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if shard.is_whole or value.shape != shard.parameter.shape or key in _BY_PARAMETER:
        # Another optimizer may load the same dict, and both count their steps in place.
        return value.clone()
    start, end = shard.range
    like_parameter = torch.empty_like(shard.parameter, dtype=value.dtype, device=value.device, requires_grad=False)
    return flatten(like_parameter.copy_(value))[start:end].clone()
