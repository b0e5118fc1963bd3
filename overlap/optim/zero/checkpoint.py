"""The sharded state in pieces, which can be loaded on another number of ranks.

A value with one element for every element of a parameter is a flat piece named by the elements that it holds, in the
order of the parameter's memory: ``3/exp_avg/0:512``. Other values, such as ``3/step``, are the same on every rank that
has them. ``manifest`` has what belongs to no parameter, and how the parameters lay in memory. A reader finds the pieces
that overlap with its own elements, and reads only these. All forms of a saved state are made of pieces:

- the folder of ``overlap.save``, where each piece is in boxes of the parameter's own shape;
- the pieces of one rank, in ``overlap.state_dict``, which that rank loads as they are; :func:`merged`, those of all
  ranks are for any number of them;
- :meth:`ShardedState.consolidate`, where one rank puts together those of all to the ``state_dict()`` of the plain
  optimizer.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap._torch.c10d import side_group
from overlap.errors import ConfigurationError
from overlap.optim.zero.shards import Range, Shard, copy_options, flatten, options_of
from overlap.optim.zero.state import check_divisible, is_per_element, tensors_in
from overlap.ranks.values import Split, receive, send, snapshot, split

Pieces = Mapping[str, Any]

MANIFEST = "manifest"
# The key of a parameter's master, its copy in a wider dtype.
_MASTER = "master_param"
_NAME = re.compile(r"(?P<index>\d+)/(?P<key>.+?)(?:/(?P<start>\d+):(?P<end>\d+))?")
_NO_STATE = "has no state yet: save with overlap.save(folder, ddp, zero), and load with overlap.load(folder, ddp, zero)"
_CPU = torch.device("cpu")
# Of the parameters whose state is gathered at a time.
_BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class ShardedState:
    """The optimizer of this rank's chunks, and the parameters to which they belong."""

    optimizer: Optimizer
    param_groups: Sequence[dict[str, Any]]
    """The groups of whole parameters."""
    shards: Sequence[Shard]
    """The shard of each parameter, in the groups' order."""
    process_group: dist.ProcessGroup

    # Saving.

    def pieces(self) -> dict[str, Any]:
        """This rank's pieces, as views if possible.

        Raises:
            UnsupportedError: a value of a parameter that is cut cannot be divided.
        """
        own = self.optimizer.state_dict()
        chunks = [chunk for group in self.optimizer.param_groups for chunk in group["params"]]
        found: dict[str, Any] = {
            MANIFEST: {
                "state": as_plain({key: value for key, value in own["state"].items() if key not in range(len(chunks))}),
                "entries": as_plain(entries_of(own)),
                "options": [as_plain(options_of(group)) for group in self.param_groups],
                "dtypes": [shard.dtype for shard in self.shards],
                "strides": [list(shard.strides) for shard in self.shards],
                "groups": [len(group["params"]) for group in self.param_groups],
                "shapes": [list(shard.parameter.shape) for shard in self.shards],
            }
        }
        place_of = {id(chunk): place for place, chunk in enumerate(chunks)}
        for index, shard in enumerate(self.shards):
            if shard.own is None:
                continue
            state = as_plain(own["state"].get(place_of[id(shard.own)], {}))
            check_divisible(self.optimizer, shard, state, shard.own.shape)
            if shard.has_master:
                state = {**state, _MASTER: shard.own}
            found |= _named(index, state, shard.own.shape, needed(shard), shard.strides)
        return found

    def without_values(self) -> dict[str, Any]:
        """The consolidated state of an optimizer that has none of any parameter.

        ``torch.distributed.checkpoint.load`` loads what it finds in a ``state_dict()``, which is nothing; with this
        entry, which no checkpoint has, it fails.
        """
        manifest = self.pieces()[MANIFEST]
        return {"state": dict(manifest["state"]), **manifest["entries"], _NO_STATE: None}

    def blocks(self, pieces: Pieces, to: int | None) -> list[tuple[Pieces, Split]]:
        """``pieces`` in parts for :meth:`consolidate`, of blocks of parameters after what belongs to none.

        Raises:
            ConfigurationError: there is no rank ``to``, or a piece is neither tensors nor plain values.
        """
        ranks = self.process_group.size()
        if to is not None and not 0 <= to < ranks:
            raise ConfigurationError(
                f"consolidate_state_dict(to={to}): ranks of the group are 0 to {ranks - 1}, and None stands for all"
            )
        ends_bytes = list(itertools.accumulate(shard.parameter.nbytes for shard in self.shards))
        blocks: dict[int, dict[str, Any]] = {-1: {}, **{end // _BLOCK_BYTES: {} for end in ends_bytes}}
        for name, value in pieces.items():
            number = -1 if name == MANIFEST else ends_bytes[place_of(name)[0]] // _BLOCK_BYTES
            blocks[number][name] = value
        return [(block, split(block, "zero.state")) for block in blocks.values()]

    def consolidate(self, to: int | None, blocks: Sequence[tuple[Pieces, Split]]) -> dict[str, Any] | None:
        """Put the state together in the form of the plain optimizer on rank ``to``, or on all ranks, to which each rank
        sends its tensors of one block of parameters after another; ``None`` on the other ranks. The groups are left
        out."""
        group, rank, ranks = side_group(self.process_group), self.process_group.rank(), self.process_group.size()
        root, parts = to or 0, list[dict[str, Any]]()
        manifest: dict[str, Any] = {}
        for pieces, message in blocks:
            if rank != root:
                send(message, root, group)
                parts += [receive(root, group)] if to is None else []
                continue
            everyone = merged([snapshot(pieces) if one == rank else receive(one, group) for one in range(ranks)])
            manifest = manifest or everyone[MANIFEST]
            try:
                state = self._joined({**everyone, MANIFEST: manifest}, is_whole=True)
                parts.append({"state": state} if parts else {**manifest["entries"], "state": manifest["state"]})
            except ConfigurationError as error:
                parts.append({"failure": str(error), "state": {}})
            for one in range(ranks) if to is None else ():
                if one != rank:
                    send(split(parts[-1]), one, group)
        for part in parts:
            if "failure" in part:
                raise ConfigurationError(part["failure"])
        states = {key: value for part in parts for key, value in part["state"].items()}
        return {**parts[0], "state": states} if parts else None

    # Loading.

    def check_pieces(self, pieces: Pieces) -> None:
        """Raises: ConfigurationError: ``pieces`` are of other parameters, or lack elements of this rank."""
        self._check_manifest(pieces[MANIFEST])
        for name, (index, key, held) in self._places(pieces).items():
            shard, value = self.shards[index], pieces[name]
            if key == _MASTER and not shard.has_master:
                raise ConfigurationError(
                    f"the state has a copy of {shard.name} in {value.dtype}, from which it was stepped, and this "
                    f"optimizer keeps none: give ZeroRedundancyOptimizer master_dtype={value.dtype}, with parameters "
                    "of the dtype that they had"
                )
            if held is None:
                check_divisible(self.optimizer, shard, {key: value}, (shard.range[1] - shard.range[0],))

    @torch.no_grad()
    def load_pieces(self, pieces: Pieces) -> None:
        """Replace the state, masters and hyperparameters of this rank by those in ``pieces``, which have passed
        :meth:`check_pieces`, after the model's parameters."""
        manifest, state = pieces[MANIFEST], self._joined(pieces)
        dtypes = manifest["dtypes"] or [None] * len(self.shards)
        loaded = {**self.optimizer.state_dict(), **cloned(manifest["entries"]), "state": cloned(manifest["state"])}
        owned = {id(shard.own): (index, shard) for index, shard in enumerate(self.shards) if shard.own is not None}
        for shard in self.shards:
            shard.follow()
        chunks = [chunk for group in self.optimizer.param_groups for chunk in group["params"]]
        for place, chunk in enumerate(chunks):
            index, shard = owned[id(chunk)]
            values = state.get(index, {})
            master = values.pop(_MASTER, None)
            if shard.has_master:
                chunk.copy_(shard.shaped(shard.view) if master is None else master.view_as(chunk))
            if values or (index in state and master is None):
                loaded["state"][place] = values
        for group, values in zip(loaded["param_groups"], manifest["options"], strict=True):
            group.update(values)
        self.optimizer.load_state_dict(loaded)
        for place, chunk in enumerate(chunks):
            given, now = loaded["state"].get(place, {}), self.optimizer.state.get(chunk, {})
            _keep_values(given, now, chunk, is_as_saved=dtypes[owned[id(chunk)][0]] == chunk.dtype)
        copy_options(self.optimizer.param_groups, self.param_groups)

    def load_whole(self, state_dict: Mapping[str, Any], *, dtypes: Sequence[torch.dtype | None] | None = None) -> None:
        """Load this rank's part of a state in the form of the plain optimizer; ``dtypes`` are those in which the
        parameters were stepped, if known.

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
        keys = [key for group in groups for key in group["params"]]
        rest = {key: value for key, value in state_dict["state"].items() if key not in keys}
        manifest = self.manifest(
            state=rest,
            entries=entries_of(state_dict),
            options=[options_of(group) for group in groups],
            groups=[len(group["params"]) for group in groups],
            dtypes=dtypes,
        )
        self._check_manifest(manifest)
        pieces: dict[str, Any] = {MANIFEST: manifest}
        for index, (shard, key) in enumerate(zip(self.shards, keys, strict=True)):
            state, parameter = state_dict["state"].get(key, {}), shard.parameter
            check_divisible(self.optimizer, shard, state, parameter.shape)
            pieces |= _named(index, state, parameter.shape, (0, parameter.numel()), parameter.stride())
        self.check_pieces(pieces)
        self.load_pieces(pieces)

    # Pieces.

    def manifest(self, **given: Any) -> dict[str, Any]:
        """That of pieces of parameters that lie in memory as they do here."""
        shapes = [list(shard.parameter.shape) for shard in self.shards]
        return {**given, "strides": [shard.parameter.stride() for shard in self.shards], "shapes": shapes}

    def _check_manifest(self, manifest: Mapping[str, Any]) -> None:
        groups = [len(group["params"]) for group in self.param_groups]
        if manifest["groups"] != groups:
            raise ConfigurationError(
                f"the checkpoint has groups of {manifest['groups']} parameters, but this optimizer has {groups}"
            )
        for shard, shape, strides in zip(self.shards, manifest["shapes"], manifest["strides"], strict=True):
            if shape != list(shard.parameter.shape):
                raise ConfigurationError(
                    f"{shard.name}: its shape in the checkpoint is {shape}, here {list(shard.parameter.shape)}"
                )
            here = zip(shape, strides, shard.parameter.stride(), strict=True)
            if any(length != 1 and there != own for length, there, own in here):
                raise ConfigurationError(
                    f"{shard.name}: its strides in the checkpoint are {strides}, here "
                    f"{shard.parameter.stride()}: bring the model into that memory format, or load a consolidated "
                    "state_dict() instead"
                )

    def _places(self, names: Iterable[str], *, is_whole: bool = False) -> dict[str, tuple[int, str, Range | None]]:
        """Of each piece among ``names`` that this rank needs (for ``is_whole`` parameters, if asked for): its
        parameter, its key, and its elements.

        Raises:
            ConfigurationError: elements are missing.
        """
        places: dict[str, tuple[int, str, Range | None]] = {}
        missing: dict[tuple[int, str], int] = {}
        for name in names:
            if name == MANIFEST:
                continue
            index, key, held = place_of(name)
            shard = self.shards[index]
            if not is_whole and shard.own is None:
                continue
            if held is None:
                places[name] = index, key, None
                continue
            start, end = needed(shard, is_whole=is_whole)
            common = min(end, held[1]) - max(start, held[0])
            missing[index, key] = missing.get((index, key), end - start) - max(0, common)
            if common > 0 or start == end:
                places[name] = index, key, held
        for (index, key), numel in missing.items():
            if numel:
                shard = self.shards[index]
                raise ConfigurationError(
                    f"this rank's share of {shard.name} of shape {tuple(shard.parameter.shape)} is not the one that "
                    f"was saved ({numel} elements of {key!r} are missing): use the same partition, order of "
                    "parameters, memory format and number of ranks, or the states of all ranks"
                )
        return places

    def _joined(self, pieces: Pieces, *, is_whole: bool = False) -> dict[int, Any]:
        """The state of each parameter from its pieces, as this rank's chunks have it, or as a whole."""
        state: dict[int, dict[str, Any]] = {}
        flat: dict[tuple[int, str], Tensor] = {}
        for name, (index, key, held) in self._places(pieces, is_whole=is_whole).items():
            values, value = state.setdefault(index, {}), pieces[name]
            if held is None:
                values[key] = cloned(value)
                continue
            start, end = needed(self.shards[index], is_whole=is_whole)
            if (index, key) not in flat:
                flat[index, key] = values[key] = torch.empty(end - start, dtype=value.dtype, device=value.device)
            first, last = max(start, held[0]), min(end, held[1])
            if first < last:
                flat[index, key][first - start : last - start] = value[first - held[0] : last - held[0]]
        for (index, key), joined in flat.items():
            shard = self.shards[index]
            if is_whole or shard.is_whole:
                strides = pieces[MANIFEST]["strides"][index]
                state[index][key] = joined.as_strided(shard.parameter.size(), strides)
        return state


def merged(saved: Sequence[Pieces]) -> dict[str, Any]:
    """The pieces of all ranks together. Of those that several have, such as the manifest, the first rank's count: it
    has something to step, as state that belongs to no parameter may need."""
    return {name: value for pieces in reversed(saved) for name, value in pieces.items()}


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


def as_plain(value: Any) -> Any:
    """``value`` with NumPy's numbers as Python's, which ``torch.load(weights_only=True)`` accepts."""

    def plain(leaf: Any) -> Any:
        is_number_of_numpy = type(leaf).__module__ == "numpy" and getattr(leaf, "ndim", None) == 0
        return leaf.item() if is_number_of_numpy else leaf

    return _mapped(value, plain)


def cloned(value: Any, *, device: torch.device | None = None) -> Any:
    """A copy of ``value`` that shares no tensor with it. Pickling a view would save all of its memory."""

    def clone(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().to(device or leaf.device, copy=True)
        return copy.deepcopy(leaf)

    return _mapped(value, clone)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(item, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, function) for item in value)
    return function(value)


def entries_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state_dict.items() if key not in ("state", "param_groups", _NO_STATE)}


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


def _named(
    index: int, state: Mapping[str, Any], shape: Sequence[int], held: Range, strides: Sequence[int]
) -> Iterator[tuple[str, Any]]:
    """The pieces of a parameter's ``state``, in which values per element have this ``shape``, these elements, and are
    to be flat in the order of ``strides``."""
    for key, value in state.items():
        if not is_per_element(value, shape):
            yield f"{index}/{key}", value
            continue
        flat = value
        if value.dim() == len(strides) and value.stride() != tuple(strides):
            flat = torch.empty_strided(value.size(), tuple(strides), dtype=value.dtype, device=value.device)
            flat.copy_(value)
        yield f"{index}/{key}/{held[0]}:{held[1]}", flatten(flat)


def place_of(name: str) -> tuple[int, str, Range | None]:
    """The parameter, the key and the elements of the piece of this name."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    held = None if match["start"] is None else (int(match["start"]), int(match["end"]))
    return int(match["index"]), match["key"], held


def needed(shard: Shard, *, is_whole: bool = False) -> Range:
    """The elements of ``shard`` in this rank's state, or in that of the ``is_whole`` parameter."""
    return (0, shard.parameter.numel()) if is_whole or shard.is_whole else shard.range
