"""The optimizer's state: this rank's part of it, the whole of it, and a view of it under the whole parameters.

[Note: state by structure]

Each rank's optimizer makes the state of its chunks. How a value of that state belongs to its parameter follows from its
shape alone: a tensor of the chunk's shape has one value per element, so the ranks' tensors are parts of one. A
0-dimensional tensor, a number or any other value without larger tensors is one per parameter, so it is the same on all
ranks. Anything else depends on how the parameter was cut (a scale per block, a factor per row) and is refused by name.

Where a rank holds the whole parameter (``partition="parameter"``) there is nothing to put together, and its state may
be anything. A parameter without dimensions has one element and is never cut, since its two kinds of state look alike.
State under keys that are not parameters, and entries of ``state_dict()`` beside state and groups, belong to the
optimizer as a whole and are the same on all ranks.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap.errors import ConfigurationError, TrainingLoopError, UnsupportedError
from overlap.join.group_collectives import of_all_ranks, on_rank
from overlap.optim.packed_state import as_plain, cloned, fingerprint, tensors_in
from overlap.optim.zero.partition import Range, copy_options, options_of
from overlap.optim.zero.shards import Shard, flatten

__all__ = [
    "ConsolidatedState",
    "Part",
    "ShardedState",
    "StateView",
    "assemble",
    "check_divisible",
    "check_new_state",
    "difference",
    "is_per_element",
    "piece_of",
]

# The key of a parameter's master, its copy in a wider dtype.
MASTER = "master_param"

# In an exchange of state: the parameter as the update last wrote it.
_PUBLISHED = "the parameter as published"

CPU = torch.device("cpu")

# Of the state that is gathered at a time.
_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Part:
    """One rank's part of the state of all parameters, which are numbered in the order of the groups.

    ``vars(part)`` holds tensors and plain values only, and ``Part(**saved)`` is the part again.
    """

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
        """This rank's part, of which tensors are not copied, as the optimizer of the chunks saves it, so that its
        hooks and overrides take part."""
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
            state,
            [as_plain(options_of(group)) for group in self.param_groups],
            as_plain({key: value for key, value in packed["state"].items() if key not in range(len(chunks))}),
            as_plain({key: value for key, value in packed.items() if key not in ("state", "param_groups")}),
            [shard.dtype for shard in self.shards],
        )
        return replace(part, strides=[shard.strides for shard in self.shards], steps=bool(chunks))

    def loadable(
        self,
        state: Mapping[int, Mapping[str, Any]],
        options: Sequence[Mapping[str, Any]],
        beside: Mapping[Any, Any],
        entries: Mapping[str, Any],
        dtypes: Sequence[torch.dtype | None] | None,
    ) -> Part:
        """A part that this rank can :meth:`load`."""
        return Part(
            partition=self.partition,
            ranges=[shard.range for shard in self.shards],
            strides=[shard.parameter.stride() for shard in self.shards],
            dtypes=dtypes or [None] * len(self.shards),
            state=state,
            options=options,
            beside=beside,
            entries=entries,
        )

    @torch.no_grad()
    def load(self, part: Part) -> None:
        """Replace the state, masters and hyperparameters of this rank by ``part``, after the model's parameters.

        State that is missing is made anew if the optimizer makes it at its first step.
        """
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
        if found := difference(everyone, ranges=[shard.ranges for shard in self.shards]):
            (index, key), values = found
            differs = f"differs between ranks: {values}"
            optimizer = type(self.optimizer).__name__
            if index is None:
                raise UnsupportedError(
                    f"{optimizer}: {key!r}, which belongs to no parameter, {differs}. It depends on "
                    "all parameters, of which each rank steps a part; use plain DDP with this optimizer"
                )
            raise UnsupportedError(
                f"{optimizer}: state {key!r} of {self.shards[index].name} {differs}. An optimizer "
                "that does not treat each element by itself needs ZeroRedundancyOptimizer(..., partition='parameter')"
            )
        return replace(part, **next((one for _, one in gathered if one is not None), {}))

    def described(self, part: Part) -> dict[_Place, str]:
        """The values that must agree between ranks, as text; see :func:`difference`.

        Raises:
            UnsupportedError: a value of a parameter that is cut belongs neither to its elements nor to the parameter.
        """
        described: dict[_Place, str] = {}
        for index, state in part.state.items():
            shard, (start, end) = self.shards[index], part.ranges[index]
            if not part.is_cut(shard) or (start == end and shard.parameter.numel()):
                continue
            for key, value in state.items():
                check_divisible(self.optimizer, shard, key, value, (end - start,))
                kind = value.dtype if is_per_element(value, (end - start,)) else fingerprint(value)
                described[index, key] = str(kind)
        if part.steps:
            shared: dict[Any, Any] = {**part.beside, **part.entries}
            for place, options in enumerate(part.options):
                shared.update((f"{key} of group {place}", value) for key, value in options.items())
            described.update(((None, str(key)), fingerprint(value)) for key, value in shared.items())
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
                if shard.is_whole and any(parts):
                    state[index] = next(one for one in parts if one is not None)
                elif any(one is not None for one in parts):
                    state[index] = assemble(parts, shard.ranges, shard.parameter.size(), shard.strides)
        if to not in (None, rank):
            return None
        return {"state": {**state, **shared.beside}, **shared.entries}

    def divided(self, state_dict: Mapping[str, Any], *, dtypes: Sequence[torch.dtype | None] | None = None) -> Part:
        """This rank's part of a state in the form of the plain optimizer.

        Args:
            state_dict: of the plain optimizer.
            dtypes: in which the parameters were stepped, in the order of the groups, if known.

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
            state,
            [options_of(group) for group in groups],
            {key: value for key, value in state_dict["state"].items() if key not in index_of},
            {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")},
            dtypes,
        )

    @torch.no_grad()
    def follow_strides(self) -> None:
        """Bring the state and masters of parameters whose memory format was changed into the new order of elements.

        Communication: nothing if no strides have changed; else one gather for each parameter whose strides have.
        """
        permuted = [(index, shard) for index, shard in enumerate(self.shards) if shard.is_permuted]
        state = self.part().state if permuted else {}
        for index, shard in permuted:
            shape = shard.views[shard.rank].shape
            values = {key: value for key, value in state.get(index, {}).items() if is_per_element(value, shape)}
            if shard.published is not None:
                values[_PUBLISHED] = shard.published
            strides = shard.strides
            shard.follow()
            if shard.is_whole:
                continue
            parts = of_all_ranks(cloned(values, device=CPU), self.process_group)
            whole = assemble(parts, shard.ranges, shard.parameter.size(), strides)
            for key, value in values.items():
                value.copy_(piece_of(shard, whole[key]))


def _keep_values(given: Mapping[str, Any], loaded: dict[str, Any], chunk: Tensor, *, is_as_saved: bool) -> None:
    """Undo what PyTorch's ``load_state_dict`` does to strings, which it takes for sequences, and to codes, counters and
    numbers: it loads all in the chunk's dtype.

    Moments stay in that dtype unless they were in another one beside the same dtype when they were saved; values
    that the optimizer's own ``load_state_dict`` has placed stay as they are.
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
    """Check the state of chunks that has come into being since the last call; ``known`` remembers its size.

    Raises:
        UnsupportedError: a value belongs neither to an element nor to the parameter.
    """
    for shard in shards:
        state = optimizer.state.get(shard.own, {}) if shard.own is not None else {}
        if shard.own is None or shard.is_whole or known.get(id(shard)) == len(state):
            continue
        known[id(shard)] = len(state)
        for key, value in state.items():
            check_divisible(optimizer, shard, key, value, shard.own.shape)


def assemble(
    parts: Sequence[Mapping[Any, Any] | None],
    ranges: Sequence[Range],
    shape: Sequence[int],
    strides: Sequence[int],
) -> dict[Any, Any]:
    """The state of a parameter that was cut, in CPU memory.

    Args:
        parts: of all ranks; ``None`` where a rank has no state of it.
        ranges: the elements of each, in the order of memory.
        shape: of the parameter.
        strides: of the parameter, which are that order.
    """
    numel = math.prod(shape)
    held = [
        (part, start, end)
        for part, (start, end) in zip(parts, ranges, strict=True)
        if part is not None and (start < end or not numel)
    ]
    whole: dict[Any, Any] = {}
    for key, first, length in ((key, part[key], end - start) for part, start, end in held for key in part):
        if key in whole:
            continue
        whole[key] = first
        if is_per_element(first, (length,)):
            whole[key] = torch.empty_strided(tuple(shape), tuple(strides), dtype=first.dtype)
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


_Place = tuple[int | None, str]
"""A parameter, ``None`` for values that belong to none, and a key of the state."""


def difference(
    everyone: Sequence[Mapping[_Place, str]], *, ranges: Sequence[Sequence[Range]]
) -> tuple[_Place, str] | None:
    """The first value that is not the same on all ranks, and how it differs.

    Args:
        everyone: the result of :meth:`ShardedState.described` on each rank.
        ranges: of each parameter, the elements of each rank; one without elements may lack its state.
    """
    first: dict[_Place, tuple[int, str]] = {}
    for rank, described in enumerate(everyone):
        for place, text in described.items():
            other, expected = first.setdefault(place, (rank, text))
            if text != expected:
                return place, f"rank {other} has {expected}, rank {rank} {text}"
    for place, (other, text) in first.items():
        for rank, (start, end) in enumerate(ranges[place[0]] if place[0] is not None else ()):
            if start < end and place not in everyone[rank]:
                return place, f"rank {other} has {text}, rank {rank} missing"
    return None


class ConsolidatedState:
    """The ``state_dict()`` between one consolidation and the next change of the state."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.is_untouched = True
        """Whether no rank has changed its state since the optimizer was made."""
        self._is_current = False
        self._state: dict[str, Any] | None = None

    def note_change(self) -> None:
        """An update or a loaded state makes the consolidated one stale; its memory is released."""
        self.is_untouched, self._is_current, self._state = False, False, None

    def reset(self) -> None:
        """The state is again as it was when the optimizer was made."""
        self.is_untouched, self._is_current, self._state = True, False, None

    def keep(self, state: dict[str, Any] | None) -> None:
        """Keep a consolidated state; ``None`` if that was for another rank, which takes nothing away from this one."""
        self._state = self._state if state is None else state
        self._is_current = True

    def packed(self, param_groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """A ``state_dict()`` with these groups, which the caller may change; empty if another rank holds the state.

        Raises:
            TrainingLoopError: the state was not consolidated since it last changed.
        """
        if not self._is_current:
            raise TrainingLoopError(
                "the state is divided among the ranks, and was not consolidated since it last changed: call "
                f"consolidate_state_dict(to={self._rank}), or to=None for all ranks, on every rank right before "
                "state_dict(), or save sharded_state_dict() instead"
            )
        if self._state is None:
            return {}
        state = {key: dict(one) if isinstance(one, dict) else one for key, one in self._state["state"].items()}
        groups: list[dict[str, Any]] = []
        index = 0
        for group in param_groups:
            places = list(range(index, index := index + len(group["params"])))
            groups.append(
                {**{key: as_plain(value) for key, value in group.items() if key != "params"}, "params": places}
            )
        entries = {key: value for key, value in self._state.items() if key != "state"}
        return {"state": state, "param_groups": groups, **entries}


_MISSING = object()


class StateView(defaultdict[Any, Any]):
    """``optimizer.state`` with whole parameters for keys. It acts on the state: an entry that is set or removed here is
    set or removed there, and one for a parameter that this rank has no part of is ignored.

    ``before_change`` is called before each change, and may refuse it.

    Raises:
        ConfigurationError: a state is set that has tensors of another shape than this rank's part.
    """

    def __init__(self, optimizer: Optimizer, shards: Mapping[int, Shard], before_change: Callable[[], None]) -> None:
        inner = optimizer.state
        held = {s.parameter: inner[s.own] for s in shards.values() if s.own is not None and s.own in inner}
        beside = {key: value for key, value in inner.items() if not isinstance(key, Tensor)}
        super().__init__(dict, {**held, **beside})
        self._inner, self._shards, self._before_change = inner, shards, before_change

    def __missing__(self, key: Any) -> Any:
        return self.setdefault(key, {})

    def __setitem__(self, key: Any, value: Any) -> None:
        shard = self._shards.get(id(key))
        if shard is not None:
            _check_shapes(shard, value)
        self._before_change()
        super().__setitem__(key, value)
        if shard is None:
            self._inner[key] = value
        elif shard.own is not None:
            self._inner[shard.own] = value

    def __delitem__(self, key: Any) -> None:
        self._before_change()
        super().__delitem__(key)
        shard = self._shards.get(id(key))
        inner_key: Any = key if shard is None else shard.own
        self._inner.pop(inner_key, None)

    def clear(self) -> None:
        """Remove all of this rank's state; the next step makes it anew, as after construction."""
        self._before_change()
        super().clear()
        self._inner.clear()

    def pop(self, key: Any, default: Any = _MISSING) -> Any:
        """Remove the state of ``key``, and return it. A rank that holds none returns ``{}``, or ``default``."""
        if key in self:
            value = self[key]
            del self[key]
            return value
        if default is _MISSING and id(key) not in self._shards:
            raise KeyError(key)
        return {} if default is _MISSING else default

    def popitem(self) -> tuple[Any, Any]:
        """Remove the last state, and return its key and it."""
        if not self:
            raise KeyError("the state is empty")
        key = next(reversed(self))
        return key, self.pop(key)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The state of ``key``, after setting it if there is none."""
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **values: Any) -> None:
        """Set the state of several keys."""
        for key, value in dict(*others, **values).items():
            self[key] = value

    def __ior__(self, other: Any) -> Self:  # type: ignore[misc]
        self.update(other)
        return self

    def replace(self, state: Mapping[Any, Any]) -> None:
        """Replace all entries by those of ``state``."""
        given = dict(state)
        for key, value in given.items():
            if id(key) in self._shards:
                _check_shapes(self._shards[id(key)], value)
        self.clear()
        self.update(given)

    def __reduce__(self) -> Any:
        return defaultdict, (dict, dict(self))


def _check_shapes(shard: Shard, state: Any) -> None:
    if shard.own is None or not isinstance(state, Mapping):
        return
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != shard.own.shape:
            raise ConfigurationError(
                f"zero.state of {shard.name} is set with {key!r} of shape {tuple(value.shape)}, but this rank's "
                f"part of the parameter has shape {tuple(shard.own.shape)}: set {{}} to reset the state, or pass "
                "the whole state to zero.load_state_dict()"
            )
