"""The optimizer's state: this rank's part of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap.errors import UnsupportedError
from overlap.join.group_collectives import of_all_ranks
from overlap.optim.zero.kinds import Kind, Kinds, StateValue, tensors_in
from overlap.optim.zero.parameter_groups import copy_options, options_of
from overlap.optim.zero.plain_values import as_plain, cloned, fingerprint
from overlap.optim.zero.sharding import Shard

__all__ = ["CPU", "MASTER", "GlobalState", "LocalState", "ShardedState", "check_new_state"]

# The key of a parameter's master, its copy in a wider dtype.
MASTER = "master_param"

CPU = torch.device("cpu")

_What = tuple[int | None, str]
"""The place of a parameter, ``None`` for what belongs to none, and a key of the state."""


@dataclass(frozen=True)
class GlobalState:
    """What belongs to no parameter: the same on every rank."""

    state: dict[Any, Any] = field(default_factory=dict)
    """State under keys that are not parameters."""
    entries: dict[str, Any] = field(default_factory=dict)
    """What the optimizer's own ``state_dict()`` has beside state and groups."""


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

    @property
    def are_cut(self) -> bool:
        """Whether parameters are divided by element."""
        return not any(shard.is_whole for shard in self.shards.values())

    @property
    def owns_something(self) -> bool:
        """Whether this rank's optimizer has anything to step."""
        return any(shard.own is not None for shard in self.shards.values())

    def kinds(self, values: Sequence[StateValue]) -> Kinds:
        """What tells the kinds of ``values``."""
        return Kinds(type(self.optimizer).__name__, values, are_cut=self.are_cut)

    def local(self) -> LocalState:
        """This rank's part, as the optimizer of its chunks saves it, so that its own hooks and overrides take part."""
        packed = self.optimizer.state_dict()
        order = [chunk for group in self.optimizer.param_groups for chunk in group["params"]]
        place_of = {id(chunk): place for place, chunk in enumerate(order)}
        by_shard: dict[int, dict[str, Any]] = {}
        for shard in self.shards.values():
            if shard.own is None:
                continue
            place = place_of[id(shard.own)]
            master = {MASTER: shard.own} if shard.has_master else {}
            if place in packed["state"] or master:
                by_shard[id(shard)] = {**packed["state"].get(place, {}), **master}
        beside = {key: value for key, value in packed["state"].items() if key not in range(len(order))}
        entries = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
        return LocalState(self, by_shard, GlobalState(beside, entries))

    @torch.no_grad()
    def replace(
        self,
        states: Mapping[int, dict[str, Any]],
        options: Sequence[Mapping[str, Any]],
        shared: GlobalState,
        *,
        dtypes: Mapping[int, torch.dtype],
    ) -> None:
        """Replace the state of this rank's chunks, given by ``id`` of the shard, and the options of each group.

        State that is missing is made anew if the optimizer makes it at its first step. ``dtypes`` are those in which
        chunks were stepped when the state was saved, by ``id`` of the shard, as far as that is known.
        """
        by_chunk = {id(shard.own): shard for shard in self.shards.values() if shard.own is not None}
        packed = self.optimizer.state_dict()
        order = [chunk for group in self.optimizer.param_groups for chunk in group["params"]]
        packed.update(cloned(shared.entries))
        packed["state"] = cloned(shared.state)
        for place, chunk in enumerate(order):
            shard = by_chunk[id(chunk)]
            state = dict(states.get(id(shard), {}))
            master = state.pop(MASTER, None)
            if master is not None and master.dtype == shard.parameter.dtype:
                # Of a run with a wire, whose true weights the parameters need not equal.
                shard.keep_true()
            if master is not None and shard.has_master:
                chunk.copy_(master.view_as(chunk))
            elif shard.has_master:
                chunk.copy_(shard.shaped(shard.views[shard.rank]))
            shard.note_written()
            if state or (id(shard) in states and master is None):
                packed["state"][place] = state
        for group, given in zip(packed["param_groups"], options, strict=True):
            group.update(given)
        self.optimizer.load_state_dict(packed)
        for place, chunk in enumerate(order):
            is_as_saved = dtypes.get(id(by_chunk[id(chunk)])) == chunk.dtype
            _keep_values(
                packed["state"].get(place, {}), self.optimizer.state.get(chunk, {}), chunk, is_as_saved=is_as_saved
            )
        copy_options(self.optimizer.param_groups, self.param_groups)


def _keep_values(given: Mapping[str, Any], loaded: dict[str, Any], chunk: Tensor, *, is_as_saved: bool) -> None:
    """Undo what PyTorch's ``load_state_dict`` does to strings, which it takes for sequences, and to codes, counters and
    numbers: it loads all in the chunk's dtype.

    Moments stay in that dtype unless they were in another one beside the same dtype when they were saved; what the
    optimizer's own ``load_state_dict`` has seen to stays as it is.
    """
    for key, value in given.items():
        now = loaded.get(key)
        if isinstance(value, (str, dict, list, tuple)) and not tensors_in(value):
            loaded[key] = value
        if key == "step" or not isinstance(value, Tensor) or not isinstance(now, Tensor):
            continue
        is_number = value.numel() == 1 and value.shape != chunk.shape
        is_kept = is_as_saved or is_number or not value.dtype.is_floating_point
        if is_kept and now.dtype == chunk.dtype != value.dtype:
            loaded[key] = value.to(now.device)


def check_new_state(optimizer: Optimizer, shards: Iterable[Shard], known: dict[int, int]) -> None:
    """Look at state that has come into being since the last call, of chunks; ``known`` remembers its size.

    Raises:
        UnsupportedError: a value belongs neither to an element nor to the parameter.
    """
    sizes = {id(shard): len(optimizer.state.get(shard.own, ())) for shard in shards if shard.own is not None}
    if all(known.get(shard) == size for shard, size in sizes.items()):
        return
    known.update(sizes)
    values = [
        _local_value(shard, key, value)
        for shard in shards
        if shard.own is not None
        for key, value in optimizer.state.get(shard.own, {}).items()
    ]
    kinds = Kinds(type(optimizer).__name__, values, are_cut=True)
    for value in values:
        kinds.of(value)


@dataclass(frozen=True)
class LocalState:
    """What this rank's optimizer has saved."""

    sharded: ShardedState
    by_shard: dict[int, dict[str, Any]]
    """The state of each parameter of which this rank has a part, its master included, by ``id`` of the shard."""
    shared: GlobalState

    @cached_property
    def _kinds(self) -> Kinds:
        return self.sharded.kinds(
            [
                _local_value(shard, key, value)
                for shard in self.sharded.shards.values()
                for key, value in self.by_shard.get(id(shard), {}).items()
            ]
        )

    def of(self, shard: Shard) -> dict[str, tuple[Kind, Any]]:
        """The values of one parameter, each with its kind.

        Raises:
            UnsupportedError: a value belongs neither to an element nor to the parameter.
        """
        state = self.by_shard.get(id(shard), {})
        return {key: (self._kinds.of(_local_value(shard, key, value)), value) for key, value in state.items()}

    def agree(self) -> GlobalState:
        """Compare what should be the same on all ranks; returns what belongs to no parameter, in CPU memory.

        Issues: one gather of a few bytes per value.

        Raises:
            UnsupportedError: something is of no known kind, or differs; raised on every rank.
        """
        shared = as_plain(cloned(vars(self.shared), device=CPU)) if self.sharded.owns_something else None
        try:
            mine: Any = self._described()
        except UnsupportedError as error:
            mine = str(error)
        gathered = of_all_ranks((mine, shared), self.sharded.process_group)
        everyone = [described for described, _ in gathered]
        for rank, described in enumerate(everyone):
            if isinstance(described, str):
                raise UnsupportedError(f"rank {rank}: {described}")
        known: dict[_What, tuple[int, str]] = {}
        for rank, described in enumerate(everyone):
            for what, text in described.items():
                first, expected = known.setdefault(what, (rank, text))
                if text != expected:
                    raise UnsupportedError(self._difference(what, (first, expected), (rank, text)))
        if self.sharded.are_cut:
            self._check_complete(everyone)
        # A rank that owns nothing has stepped nothing, so its values are those of the first step.
        return GlobalState(**next((one for _, one in gathered if one is not None), {}))

    def _described(self) -> dict[_What, str]:
        described: dict[_What, str] = {}
        for place, shard in enumerate(self.sharded.shards.values()):
            for key, (kind, value) in self.of(shard).items():
                if kind is not Kind.BY_PARAMETER:
                    described[place, key] = f"{kind.value}, {value.dtype}"
                elif not shard.is_whole:
                    described[place, key] = f"{kind.value}, {fingerprint(as_plain(value))}"
        if self.sharded.owns_something:
            beside = {**self.shared.state, **self.shared.entries}
            for place, group in enumerate(self.sharded.param_groups):
                beside.update((f"{key} of group {place}", value) for key, value in options_of(group).items())
            described.update(((None, str(key)), fingerprint(as_plain(value))) for key, value in beside.items())
        return described

    def _check_complete(self, everyone: Sequence[Mapping[_What, str]]) -> None:
        """A rank without elements of a parameter may lack its state, but no other rank."""
        shards = list(self.sharded.shards.values())
        found = {what: None for described in everyone for what in described}
        for what, place in ((what, what[0]) for what in found):
            if place is None:
                continue
            for rank, (start, end) in enumerate(shards[place].ranges):
                if start < end and what not in everyone[rank]:
                    first = next(other for other, described in enumerate(everyone) if what in described)
                    raise UnsupportedError(self._difference(what, (first, everyone[first][what]), (rank, "missing")))

    def _difference(self, what: _What, first: tuple[int, str], other: tuple[int, str]) -> str:
        (place, key), optimizer = what, type(self.sharded.optimizer).__name__
        told = f"rank {first[0]} has {first[1]}, rank {other[0]} {other[1]}"
        if place is None:
            return (
                f"{optimizer}: {key!r}, which belongs to no parameter, differs between ranks: {told}. It depends on "
                "all parameters, of which each rank steps a part; use plain DDP with this optimizer"
            )
        name = list(self.sharded.shards.values())[place].name
        return (
            f"{optimizer}: state {key!r} of {name} differs between ranks: {told}. An optimizer that does not treat "
            "each element by itself needs ZeroRedundancyOptimizer(..., partition='parameter')"
        )


def _local_value(shard: Shard, key: str, value: Any) -> StateValue:
    assert shard.own is not None, "state is of parameters of which this rank has a part"
    return StateValue(shard.name, tuple(shard.own.shape), key, value)
