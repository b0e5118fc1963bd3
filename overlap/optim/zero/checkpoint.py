"""The state in the plain optimizer's form: all of it on one rank, and this rank's part of it again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap.errors import ConfigurationError
from overlap.optim.zero.groups import options_of
from overlap.optim.zero.shards import Shard, flatten

if TYPE_CHECKING:
    from overlap.optim.zero.optimizer import ZeroRedundancyOptimizer

__all__ = ["MASTER", "consolidate", "install", "is_by_element", "load_plain", "state_of"]

MASTER = "master_param"
"""Where a parameter's wider copy is kept among its state."""

# State that is one number a parameter in optimizers of PyTorch; of a parameter without dimensions its shape does not
# tell.
_BY_PARAMETER = ("step", "mu_product", "eta", "mu")

_BLOCK_BYTES = 16 * 2**20


def state_of(zero: ZeroRedundancyOptimizer, shard: Shard) -> dict[str, Any]:
    """This rank's state of one parameter, its master included."""
    if shard.own is None:
        return {}
    state = dict(zero.optim.state.get(shard.own, {}))
    if shard.has_master:
        state[MASTER] = shard.own
    return state


def is_by_element(shard: Shard, key: str, value: Any) -> bool:
    """Whether a state value has an element for each that this rank owns."""
    has_shape = isinstance(value, Tensor) and shard.own is not None and value.shape == shard.own.shape
    return has_shape and key not in _BY_PARAMETER


def consolidate(zero: ZeroRedundancyOptimizer, to: int) -> dict[str, Any] | None:
    """Gather the state on rank ``to``, block by block; ``None`` on the others."""
    if not 0 <= to < zero.world_size:
        raise ConfigurationError(f"consolidate_state_dict(to={to}): ranks of the group are 0 to {zero.world_size - 1}")
    zero.wait()
    state: dict[int, dict[str, Any]] = {}
    for block in _blocks(list(zero.shards.values())):
        mine = [_on_cpu(state_of(zero, shard)) for _, shard in block]
        gathered: list[Any] | None = [None] * zero.world_size if zero.rank == to else None
        dist.gather_object(mine, gathered, group=zero.process_group, group_dst=to)
        if gathered is None:
            continue
        for (index, shard), parts in zip(block, zip(*gathered, strict=True), strict=True):
            if any(parts):
                state[index] = _assemble(shard, parts)
    if zero.rank != to:
        return None
    return {"state": state, "param_groups": _packed_groups(zero)}


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
    # Cloned, because pickling a view takes all of its memory along.
    return {k: v.detach().cpu().clone() if isinstance(v, Tensor) else v for k, v in state.items()}


def _assemble(shard: Shard, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The state of a whole parameter, from what each rank has."""
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


def _packed_groups(zero: ZeroRedundancyOptimizer) -> list[dict[str, Any]]:
    packed: list[dict[str, Any]] = []
    index = 0
    for group in zero.param_groups:
        count = len(group["params"])
        others = {key: value for key, value in group.items() if key != "params"}
        packed.append({**others, "params": list(range(index, index + count))})
        index += count
    return packed


def load_plain(zero: ZeroRedundancyOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Load this rank's part of a plain optimizer's state."""
    if not {"state", "param_groups"} <= set(state_dict):
        raise ConfigurationError(f"this is no state_dict of an optimizer: it has {sorted(map(str, state_dict))}")
    groups = state_dict["param_groups"]
    given = [len(group["params"]) for group in groups]
    expected = [len(group["params"]) for group in zero.param_groups]
    if given != expected:
        raise ConfigurationError(
            f"the state_dict has groups of {given} parameters, but this ZeroRedundancyOptimizer has {expected}"
        )
    keys = [key for group in groups for key in group["params"]]
    states: dict[int, dict[str, Any]] = {}
    for key, shard in zip(keys, zero.shards.values(), strict=True):
        if key in state_dict["state"] and shard.own is not None:
            states[id(shard)] = {k: _part(shard, k, v) for k, v in state_dict["state"][key].items()}
    install(zero, states, [options_of(group) for group in groups])


def _part(shard: Shard, key: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if shard.is_whole or value.shape != shard.parameter.shape or key in _BY_PARAMETER:
        # Another optimizer may load the same dict, and both count steps in place.
        return value.clone()
    start, end = shard.range
    like_parameter = torch.empty_like(shard.parameter, dtype=value.dtype, device=value.device, requires_grad=False)
    return flatten(like_parameter.copy_(value))[start:end].clone()


@torch.no_grad()
def install(
    zero: ZeroRedundancyOptimizer, states: Mapping[int, dict[str, Any]], options: Sequence[Mapping[str, Any]]
) -> None:
    """Give the inner optimizer the parts of state of its chunks, by ``id`` of the shard, and the groups their options.

    What is missing is as in a new optimizer of its class only where the optimizer makes it at its first step.
    """
    zero.wait()
    by_chunk = {id(shard.own): shard for shard in zero.shards.values() if shard.own is not None}
    packed = zero.optim.state_dict()
    order = [chunk for group in zero.optim.param_groups for chunk in group["params"]]
    packed["state"] = {}
    for place, chunk in enumerate(order):
        shard = by_chunk[id(chunk)]
        state = dict(states.get(id(shard), {}))
        master = state.pop(MASTER, None)
        if master is not None and shard.has_master:
            chunk.copy_(master.view_as(chunk))
        elif shard.has_master:
            chunk.copy_(shard.shaped(shard.views[shard.rank]))
        shard.note_written()
        if state:
            packed["state"][place] = state
    for group, given in zip(packed["param_groups"], options, strict=True):
        group.update(given)
    zero.optim.load_state_dict(packed)
    for ours, inner in zip(zero.param_groups, zero.optim.param_groups, strict=True):
        ours.update(options_of(inner))
