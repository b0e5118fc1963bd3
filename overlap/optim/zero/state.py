"""The optimizer's state: this rank's part of it, the whole of it, and a view of it under the whole parameters.

[Note: state by structure]

Each rank's optimizer makes the state of its chunks. How a value of that state belongs to its parameter follows from its
shape alone: a tensor of the chunk's shape has one value per element, so the ranks' tensors are parts of one. A
0-dimensional tensor, a number or any other value without larger tensors is one per parameter, so it is the same on all
ranks. Anything else depends on how the parameter was cut (a scale per block, a factor per row) and is refused by name.

Where a rank holds the whole parameter (``partition="parameter"``) there is nothing to put together, and its state may
be anything. A parameter without dimensions has one element and is never cut, since its two kinds of state look alike.
State under keys that are not parameters, and entries of ``state_dict()`` beside state and groups, are the same on all
ranks.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap.errors import ConfigurationError, UnsupportedError
from overlap.optim.zero.packed_state import as_plain, cloned, fingerprint, tensors_in
from overlap.optim.zero.partition import Range, copy_options, options_of
from overlap.optim.zero.shards import Shard, flatten
from overlap.ranks.collectives import of_all_ranks, on_rank

__all__ = [
    "Described",
    "Part",
    "ShardedState",
    "StateView",
    "assemble",
    "check_divisible",
    "check_new_state",
    "difference",
    "is_per_element",
    "packed",
    "piece_of",
]

# The key of a parameter's master, its copy in a wider dtype.
MASTER = "master_param"

CPU = torch.device("cpu")

# Of the state that is gathered at a time.
_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Part:
    """One rank's part of the state of all parameters, which are numbered in the order of the groups; ``vars(part)``
    holds tensors and plain values only."""

    partition: str
    ranges: Sequence[Range]
    """The elements of each parameter that this rank owns, in the order of its memory."""
    strides: Sequence[tuple[int, ...]]
    """The strides of each parameter, which are that order."""
    dtypes: Sequence[torch.dtype | None]
    """The dtype in which each parameter is stepped; ``None`` if unknown."""
    state: Mapping[int, Mapping[str, Any]]
    """By parameter, of those that this rank has a part of; flat if the parameter is cut. Includes masters."""
    options: Sequence[Mapping[str, Any]]
    """The hyperparameters of each group."""
    beside: Mapping[Any, Any]
    """State under keys that are not parameters."""
    entries: Mapping[str, Any]
    """Entries of the optimizer's ``state_dict()`` beside state and groups."""
    steps: bool = True
    """Whether this rank's optimizer has anything to step. If not, ``beside``, ``entries`` and counters in ``options``
    are those of the first step."""

    def is_cut(self, shard: Shard) -> bool:
        """Whether the parameter of ``shard`` was divided by element in this part."""
        return self.partition == "element" and shard.parameter.dim() > 0


@dataclass(frozen=True)
class ShardedState:
    """The optimizer of this rank's chunks, and the parameters to which they belong."""

    optimizer: Optimizer
    param_groups: Sequence[dict[str, Any]]
    """The groups of whole parameters."""
    shards: Sequence[Shard]
    """The shard of each parameter, in the groups' order."""
    partition: str
    process_group: dist.ProcessGroup

    def part(self) -> Part:
        """This rank's part, of which tensors are not copied, as the ``state_dict()`` of the optimizer has it."""
        packed = self.optimizer.state_dict()
        chunks = [chunk for group in self.optimizer.param_groups for chunk in group["params"]]
        place_of = {id(chunk): place for place, chunk in enumerate(chunks)}
        state: dict[int, dict[str, Any]] = {}
        for index, shard in enumerate(self.shards):
            if shard.own is None:
                continue
            place = place_of[id(shard.own)]
            master = {MASTER: shard.own} if shard.has_master else {}
            if place in packed["state"] or master:
                state[index] = {**as_plain(packed["state"].get(place, {})), **master}
        part = self.loadable(
            dtypes=[shard.dtype for shard in self.shards],
            state=state,
            options=[as_plain(options_of(group)) for group in self.param_groups],
            beside=as_plain({key: value for key, value in packed["state"].items() if key not in range(len(chunks))}),
            entries=as_plain(_entries(packed)),
            steps=bool(chunks),
        )
        return replace(part, strides=[shard.strides for shard in self.shards])

    def without_values(self) -> dict[str, Any]:
        """The consolidated state of an optimizer that has none of any parameter."""
        part = self.part()
        return {"state": dict(part.beside), **part.entries}

    def loadable(self, *, dtypes: Sequence[torch.dtype | None] | None, **values: Any) -> Part:
        """A part that this rank can :meth:`load`, with these fields."""
        ranges = [shard.range for shard in self.shards]
        strides = [shard.parameter.stride() for shard in self.shards]
        return Part(self.partition, ranges, strides, dtypes or [None] * len(self.shards), **values)

    @torch.no_grad()
    def load(self, part: Part) -> None:
        """Replace the state, masters and hyperparameters of this rank by ``part``, after the model's parameters."""
        for shard in self.shards:
            shard.follow()
        packed = self.optimizer.state_dict()
        packed.update(cloned(part.entries))
        packed["state"] = cloned(part.beside)
        owned = {id(shard.own): (index, shard) for index, shard in enumerate(self.shards) if shard.own is not None}
        chunks = [chunk for group in self.optimizer.param_groups for chunk in group["params"]]
        for place, chunk in enumerate(chunks):
            index, shard = owned[id(chunk)]
            state = dict(part.state.get(index, {}))
            master = state.pop(MASTER, None)
            if master is not None and master.dtype == shard.parameter.dtype:
                # Of a run with a wire, whose true weights the parameters need not equal.
                shard.keep_true()
            if shard.has_master:
                chunk.copy_(shard.shaped(shard.views[shard.rank]) if master is None else master.view_as(chunk))
            shard.note_written()
            if state or (index in part.state and master is None):
                packed["state"][place] = state
        for group, options in zip(packed["param_groups"], part.options, strict=True):
            group.update(options)
        self.optimizer.load_state_dict(packed)
        for place, chunk in enumerate(chunks):
            given, loaded = packed["state"].get(place, {}), self.optimizer.state.get(chunk, {})
            _keep_values(given, loaded, chunk, is_as_saved=part.dtypes[owned[id(chunk)][0]] == chunk.dtype)
        copy_options(self.optimizer.param_groups, self.param_groups)

    def agreed(self, part: Part) -> Part:
        """A part whose ``beside``, ``entries`` and ``options`` all ranks have agreed on, in CPU memory.

        Communication: one gather of a few bytes per value.

        Raises:
            UnsupportedError: a value can be neither divided nor shared, or differs; raised on every rank.
        """
        try:
            mine: Any = self.described(part)
        except UnsupportedError as error:
            mine = str(error)
        shared = {"options": part.options, "beside": part.beside, "entries": part.entries}
        gathered = of_all_ranks((mine, cloned(shared, device=CPU) if part.steps else None), self.process_group)
        everyone = [described for described, _ in gathered]
        for rank, described in enumerate(everyone):
            if isinstance(described, str):
                raise UnsupportedError(f"rank {rank}: {described}")
        if found := difference(everyone, [shard.ranges for shard in self.shards]):
            index, key, values = found
            where = "which belongs to no parameter," if index is None else f"of {self.shards[index].name}"
            raise UnsupportedError(
                f"{type(self.optimizer).__name__}: state {key!r} {where} differs between ranks: {values}. An optimizer "
                "that does not treat each element by itself needs ZeroRedundancyOptimizer(..., partition='parameter'), "
                "and one that does not treat each parameter by itself plain DDP"
            )
        return replace(part, **next((one for _, one in gathered if one is not None), {}))

    def described(self, part: Part) -> Described:
        """The values that must agree between ranks. Raises: UnsupportedError: one cannot be divided."""
        described: Described = {}
        for index, state in part.state.items():
            shard, (start, end) = self.shards[index], part.ranges[index]
            if not part.is_cut(shard) or start == end:
                continue
            described[index] = {}
            for key, value in state.items():
                check_divisible(self.optimizer, shard, key, value, (end - start,))
                kind = value.dtype if is_per_element(value, (end - start,)) else fingerprint(value)
                described[index][key] = str(kind)
        if part.steps:
            groups = {
                f"{key} of group {place}": value for place, one in enumerate(part.options) for key, value in one.items()
            }
            shared = {**part.beside, **part.entries, **groups}
            described[None] = {str(key): fingerprint(value) for key, value in shared.items()}
        return described

    def consolidate(self, to: int | None) -> dict[str, Any] | None:
        """Gather the state in the form of the plain optimizer on rank ``to``, or on all ranks, block by block; returns
        ``None`` on the other ranks. The groups are left out.

        Communication: as :meth:`agreed`, and one gather for each block of parameters.
        """
        rank, ranks = self.process_group.rank(), self.process_group.size()
        if to is not None and not 0 <= to < ranks:
            raise ConfigurationError(
                f"consolidate_state_dict(to={to}): ranks of the group are 0 to {ranks - 1}, and None stands for all"
            )
        part = self.part()
        shared = self.agreed(part)
        state: dict[Any, Any] = {}
        ends_bytes = list(itertools.accumulate(shard.parameter.nbytes for shard in self.shards))
        for _, indices in itertools.groupby(range(len(ends_bytes)), lambda index: ends_bytes[index] // _BLOCK_BYTES):
            block = list(indices)
            mine = {index: cloned(part.state[index], device=CPU) for index in block if index in part.state}
            group = self.process_group
            gathered = of_all_ranks(mine, group) if to is None else on_rank(to, mine, group)
            for index in block if gathered is not None else ():
                shard, parts = self.shards[index], [one.get(index) for one in gathered or ()]
                if any(one is not None for one in parts):
                    state[index] = assemble(shard, parts, shard.ranges, shard.strides, is_cut=not shard.is_whole)
        if to not in (None, rank):
            return None
        return {"state": {**state, **shared.beside}, **shared.entries}

    def divided(self, state_dict: Mapping[str, Any], *, dtypes: Sequence[torch.dtype | None] | None = None) -> Part:
        """This rank's part of a state in the form of the plain optimizer; ``dtypes`` are those in which the parameters
        were stepped, if known.

        Raises:
            ConfigurationError: it belongs to other parameters.
            UnsupportedError: a value of a parameter that is to be cut cannot be divided.
        """
        if not {"state", "param_groups"} <= set(state_dict):
            hint = "; state_dict() is empty on ranks to which it was not consolidated" if not state_dict else ""
            raise ConfigurationError(
                f"this is not a state_dict of an optimizer: its keys are {sorted(map(str, state_dict))}{hint}"
            )
        groups = state_dict["param_groups"]
        given = [len(group["params"]) for group in groups]
        expected = [len(group["params"]) for group in self.param_groups]
        if given != expected:
            raise ConfigurationError(
                f"the state_dict has groups of {given} parameters, but this ZeroRedundancyOptimizer has {expected}"
            )
        index_of = {key: index for index, key in enumerate(key for group in groups for key in group["params"])}
        state: dict[int, dict[str, Any]] = {}
        for place, values in state_dict["state"].items():
            if place not in index_of:
                continue
            shard = self.shards[index_of[place]]
            if not shard.is_whole:
                for key, value in values.items():
                    check_divisible(self.optimizer, shard, key, value, shard.parameter.shape)
            if shard.own is not None:
                state[index_of[place]] = {key: piece_of(shard, value) for key, value in values.items()}
        return self.loadable(
            dtypes=dtypes,
            state=state,
            options=[options_of(group) for group in groups],
            beside={key: value for key, value in state_dict["state"].items() if key not in index_of},
            entries=_entries(state_dict),
        )

    def follow_strides(self) -> None:
        """Bring the state and masters of parameters whose memory format was changed into the new order of elements.

        Communication: nothing if no strides have changed; else as :meth:`consolidate`.
        """
        if any(shard.parameter.stride() != shard.strides for shard in self.shards):
            dtypes = [shard.dtype for shard in self.shards]
            whole = self.consolidate(None)
            assert whole is not None, "consolidated on all ranks"
            self.load(self.divided(packed(whole, self.param_groups), dtypes=dtypes))


def _entries(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}


def _keep_values(given: Mapping[str, Any], loaded: dict[str, Any], chunk: Tensor, *, is_as_saved: bool) -> None:
    """PyTorch's ``load_state_dict`` takes strings for sequences, and loads codes, counters and numbers in the chunk's
    dtype: put them back. Moments stay in that dtype unless they were saved in another one beside the same dtype."""
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


def is_per_element(value: Any, shape: Sequence[int]) -> bool:
    """Whether ``value`` has one value for every element of a chunk, or of a parameter, of this shape."""
    return type(value) in (Tensor, torch.nn.Parameter) and tuple(value.shape) == tuple(shape)


def check_divisible(optimizer: Optimizer, shard: Shard, key: str, value: Any, shape: Sequence[int]) -> None:
    """Raises: UnsupportedError: ``value`` is neither one per element nor one per parameter. See [Note: state by
    structure]."""
    if is_per_element(value, shape) or not any(tensor.dim() for tensor in tensors_in(value)):
        return
    kind = f"a {type(value).__name__}"
    if isinstance(value, Tensor):
        kind += f" of shape {tuple(value.shape)} {value.dtype}"
    raise UnsupportedError(
        f"{type(optimizer).__name__}: state {key!r} of {shard.name} is {kind} for {math.prod(shape)} elements of shape "
        f"{tuple(shape)}: neither one value per element (of that shape) nor one per parameter (a number, or a tensor "
        "without dimensions), so it cannot be divided by element; use ZeroRedundancyOptimizer(..., "
        "partition='parameter')"
    )


def check_new_state(optimizer: Optimizer, shards: Iterable[Shard], known: dict[int, int]) -> None:
    """Check the state of chunks that has come into being since the last call; ``known`` remembers its size. Raises:
    UnsupportedError: a value belongs neither to an element nor to the parameter."""
    for shard in shards:
        state = optimizer.state.get(shard.own, {}) if shard.own is not None else {}
        if shard.own is None or shard.is_whole or known.get(id(shard)) == len(state):
            continue
        known[id(shard)] = len(state)
        for key, value in state.items():
            check_divisible(optimizer, shard, key, value, shard.own.shape)


def assemble(
    shard: Shard,
    parts: Sequence[Mapping[str, Any] | None],
    ranges: Sequence[Range],
    strides: Sequence[int],
    *,
    is_cut: bool,
) -> dict[str, Any]:
    """The state of the parameter of ``shard`` as a whole, in CPU memory, from the ``parts`` of all ranks, which have
    these ``ranges`` of its elements in the order of memory that ``strides`` are."""
    size, numel = shard.parameter.size(), shard.parameter.numel()
    held = [
        (part, start, end)
        for part, (start, end) in zip(parts, ranges, strict=True)
        if part and (not is_cut or start < end or not numel)
    ]
    whole: dict[str, Any] = dict(held[0][0]) if held else {}
    for key, first in whole.items() if is_cut else ():
        if is_per_element(first, (held[0][2] - held[0][1],)):
            whole[key] = torch.empty_strided(size, tuple(strides), dtype=first.dtype, device="cpu")
            flat = flatten(whole[key])
            for part, start, end in held:
                flat[start:end] = part[key]
    return whole


def piece_of(shard: Shard, value: Any) -> Any:
    """This rank's part of a value of the whole parameter, in the order of the parameter's memory; a copy."""
    if not is_per_element(value, shard.parameter.shape):
        return cloned(value)
    whole = torch.empty_like(shard.parameter, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)
    return whole if shard.is_whole else flatten(whole)[shard.range[0] : shard.range[1]].clone()


Described = dict[int | None, dict[str, str]]
"""The values that must agree between ranks, as text, by parameter; ``None`` for those that belong to none."""


def difference(everyone: Sequence[Described], ranges: Sequence[Sequence[Range]]) -> tuple[int | None, str, str] | None:
    """The first value that is not the same on all ranks with elements of its parameter, by the ``ranges`` of each: the
    parameter, the key and how it differs."""
    for index in (None, *range(len(ranges))):
        held = [
            (rank, described.get(index, {}))
            for rank, described in enumerate(everyone)
            if (index in described if index is None else ranges[index][rank][0] < ranges[index][rank][1])
        ]
        for rank, values in held[1:]:
            first, expected = held[0]
            for key in sorted(values.keys() | expected.keys()):
                one, other = expected.get(key, "nothing"), values.get(key, "nothing")
                if one != other:
                    return index, key, f"rank {first} has {one}, rank {rank} {other}"
    return None


def packed(whole: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A consolidated state with these groups as the plain optimizer's ``state_dict()``, which the caller may change."""
    places = itertools.count()
    return {
        **whole,
        "state": {key: dict(one) if isinstance(one, dict) else one for key, one in whole["state"].items()},
        "param_groups": [
            {
                **{key: as_plain(value) for key, value in group.items() if key != "params"},
                "params": list(itertools.islice(places, len(group["params"]))),
            }
            for group in param_groups
        ],
    }


class StateView(MutableMapping[Any, Any]):
    """``optimizer.state`` with whole parameters for keys. It acts on the state: an entry that is set or removed here is
    set or removed there, and one for a parameter that this rank has no part of is ignored. ``before_change`` is called
    before each change, and may refuse it.

    Raises:
        ConfigurationError: a state is set that has tensors of another shape than this rank's part.
    """

    def __init__(self, optimizer: Optimizer, shards: Mapping[int, Shard], before_change: Callable[[], None]) -> None:
        self._inner, self._shards, self._before_change = optimizer.state, shards, before_change

    def _inner_key(self, key: Any) -> Any:
        """The key of the state itself; ``None`` for a parameter that this rank has no part of."""
        shard = self._shards.get(id(key))
        return key if shard is None else shard.own

    def __iter__(self) -> Iterator[Any]:
        parameter_of = {id(shard.own): shard.parameter for shard in self._shards.values() if shard.own is not None}
        return iter([parameter_of.get(id(key), key) for key in self._inner])

    def __len__(self) -> int:
        return len(self._inner)

    def __contains__(self, key: object) -> bool:
        return self._inner_key(key) in self._inner

    def __getitem__(self, key: Any) -> Any:
        if key not in self:
            self[key] = {}
        return self._inner.get(self._inner_key(key), {})

    def get(self, key: Any, default: Any = None) -> Any:
        """The state of ``key``, or ``default``."""
        return self._inner.get(self._inner_key(key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.check({key: value})
        self._before_change()
        if (inner_key := self._inner_key(key)) is not None:
            self._inner[inner_key] = value

    def __delitem__(self, key: Any) -> None:
        self._before_change()
        if self._inner.pop(self._inner_key(key), None) is None and id(key) not in self._shards:
            raise KeyError(key)

    def clear(self) -> None:
        """Remove all of this rank's state; the next step makes it anew, as after construction."""
        self._before_change()
        self._inner.clear()

    def check(self, states: Mapping[Any, Any]) -> None:
        """Raises: ConfigurationError: a tensor in ``states`` has not the shape of this rank's part."""
        for parameter, state in states.items():
            shard = self._shards.get(id(parameter))
            if shard is None or shard.own is None or not isinstance(state, Mapping):
                continue
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.shape != shard.own.shape:
                    raise ConfigurationError(
                        f"zero.state of {shard.name} is set with {key!r} of shape {tuple(value.shape)}, but this "
                        f"rank's part of the parameter has shape {tuple(shard.own.shape)}: set {{}} to reset the "
                        "state, or pass the whole state to zero.load_state_dict()"
                    )

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))
