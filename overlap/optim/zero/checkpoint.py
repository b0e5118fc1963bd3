"""The state in files, of which each rank writes its part: at any number of ranks it loads again.

*Through torch.distributed.checkpoint*, a value with one element for every element of a parameter is saved in pieces,
one per rank, as plain tensors named by the elements that they hold: ``3/exp_avg/0:512``. A reader with another number
of ranks finds the pieces that overlap with its own elements, and reads only these.

*Of a rank by itself*, in ``overlap.state_dict``, it is a :class:`Part`. The same rank of as many ranks loads it as it
is; for another number of ranks those of all old ranks are assembled, and divided anew.
"""

from __future__ import annotations

import io
import itertools
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from overlap.errors import ConfigurationError, UnsupportedError
from overlap.optim.packed_state import Order, cloned
from overlap.optim.zero.partition import Range
from overlap.optim.zero.shards import Shard, flatten
from overlap.optim.zero.state import (
    Part,
    ShardedState,
    assemble,
    check_divisible,
    difference,
    is_per_element,
    piece_of,
)

__all__ = ["check_part", "load_part", "load_pieces", "part_from_all", "pieces_to_save"]

_MANIFEST = "manifest"

# In a name, instead of elements: the value is not a tensor, and is saved in the form of one.
_PACKED = "packed"


def pieces_to_save(sharded: ShardedState) -> dict[str, Any]:
    """This rank's part of the state by name, as views if possible.

    Communication: one gather of a few bytes per value, since of a value that all ranks have only one is saved.
    """
    part = sharded.part()
    shared = sharded.agreed(part)
    manifest = {
        "state": shared.beside,
        "entries": shared.entries,
        "dtypes": part.dtypes,
        "options": part.options,
        "strides": [list(strides) for strides in part.strides],
        **_sizes(sharded),
    }
    saved: dict[str, Any] = {_MANIFEST: _to_tensor(manifest)}
    for index, state in part.state.items():
        shard = sharded.shards[index]
        numel = shard.parameter.numel()
        start, end = (0, numel) if shard.is_whole else shard.range
        for key, value in state.items():
            if isinstance(value, (dict, list, tuple)):
                saved[f"{index}/{key}/{_PACKED}"] = _to_tensor(value)
            elif shard.own is None or not is_per_element(value, tuple(shard.own.shape)):
                saved[f"{index}/{key}"] = value
            # An empty piece is written only if there is no other one to show that the value exists.
            elif start < end or (not numel and sharded.process_group.rank() == 0):
                saved[f"{index}/{key}/{start}:{end}"] = _in_order_of_memory(shard, value)
    return saved


def _in_order_of_memory(shard: Shard, value: Tensor) -> Tensor:
    if not shard.is_whole:
        return value
    return flatten(torch.empty_like(shard.parameter, dtype=value.dtype, requires_grad=False).copy_(value))


def _sizes(sharded: ShardedState) -> dict[str, Any]:
    return {
        "groups": [len(group["params"]) for group in sharded.param_groups],
        "shapes": [list(shard.parameter.shape) for shard in sharded.shards],
    }


_SPAN = r"(?P<start>\d+):(?P<end>\d+)"
_NAME = re.compile(rf"(?P<index>\d+)/(?P<key>.+?)(?:/(?:{_SPAN}|(?P<packed>{_PACKED})))?")


@dataclass(frozen=True)
class _Entry:
    """One saved value, or one piece of a value."""

    name: str
    index: int
    key: str
    span: Range | None
    """The elements of the parameter to which a piece belongs; ``None`` for a whole value."""
    is_packed: bool
    metadata: Any

    @classmethod
    def parse(cls, name: str, prefix: str, metadata: Any) -> _Entry:
        found = _NAME.fullmatch(name.removeprefix(prefix))
        assert found is not None, "names with a / are of this form"
        start, end = found["start"], found["end"]
        span = None if start is None else (int(start), int(end))
        return cls(name, int(found["index"]), found["key"], span, found["packed"] is not None, metadata)

    def target(self) -> Tensor | None:
        """The tensor to read into; ``None`` for a value that is not a tensor."""
        if not _is_tensor(self.metadata):
            return None
        return torch.empty(self.metadata.size, dtype=self.metadata.properties.dtype)


def _is_tensor(metadata: Any) -> bool:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return isinstance(metadata, TensorStorageMetadata)


def load_pieces(sharded: ShardedState, checkpoint: Any, key: str) -> None:
    """Load this rank's part of a state that any number of ranks has saved."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(checkpoint) if isinstance(checkpoint, (str, os.PathLike)) else checkpoint
    prefix = f"{key}." if key else ""
    try:
        saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    except FileNotFoundError as error:
        raise ConfigurationError(f"{checkpoint} is not a checkpoint saved by torch.distributed.checkpoint") from error
    place = saved.get(prefix + _MANIFEST)
    if place is None or not _is_tensor(place):
        raise ConfigurationError(
            f"{checkpoint} has no {prefix + _MANIFEST!r}: no sharded_state_dict() was saved under key={key!r}"
        )
    found: dict[str, Any] = {prefix + _MANIFEST: torch.empty(place.size, dtype=torch.uint8)}
    load(found, storage_reader=reader, process_group=sharded.process_group)
    manifest = _from_tensor(found[prefix + _MANIFEST])
    _check_sizes(sharded, manifest)
    entries = [
        _Entry.parse(name, prefix, metadata)
        for name, metadata in saved.items()
        if name.startswith(prefix) and name != prefix + _MANIFEST and "/" in name.removeprefix(prefix)
    ]
    entries = [entry for entry in entries if sharded.shards[entry.index].own is not None]
    strides = [tuple(saved) for saved in manifest["strides"]]
    windows = [_window(shard, saved) for shard, saved in zip(sharded.shards, strides, strict=True)]
    values = {entry.name: entry.target() for entry in entries if _is_needed(entry, windows[entry.index])}
    load(values, storage_reader=reader, process_group=sharded.process_group)
    sharded.load(
        sharded.loadable(
            _joined(sharded, entries, values, windows, strides),
            manifest["options"],
            # Earlier versions have saved neither these nor the dtypes.
            manifest.get("state", {}),
            manifest.get("entries", {}),
            manifest.get("dtypes"),
        )
    )


def _window(shard: Shard, strides: tuple[int, ...]) -> Range:
    """The elements to read of a parameter that was saved with these strides: in another order, those of this rank may
    be anywhere."""
    is_all = shard.is_whole or strides != shard.parameter.stride()
    return (0, shard.parameter.numel()) if is_all else shard.range


def _is_needed(entry: _Entry, window: Range) -> bool:
    return entry.span is None or (entry.span[0] < window[1] and window[0] < entry.span[1])


def _joined(
    sharded: ShardedState,
    entries: Sequence[_Entry],
    values: Mapping[str, Any],
    windows: Sequence[Range],
    strides: Sequence[tuple[int, ...]],
) -> dict[int, dict[str, Any]]:
    """This rank's state, put together from whole values and pieces."""
    state: dict[int, dict[str, Any]] = {entry.index: {} for entry in entries}
    flat: dict[tuple[int, str], Tensor] = {}
    for entry in entries:
        shard, (start, end) = sharded.shards[entry.index], windows[entry.index]
        if entry.span is None:
            value = _from_tensor(values[entry.name]) if entry.is_packed else values[entry.name]
            if not shard.is_whole:
                check_divisible(sharded.optimizer, shard, entry.key, value, shard.parameter.shape)
            state[entry.index][entry.key] = value
            continue
        made = torch.empty(end - start, dtype=entry.metadata.properties.dtype)
        joined = flat.setdefault((entry.index, entry.key), made)
        if entry.name in values:
            first, last = max(start, entry.span[0]), min(end, entry.span[1])
            joined[first - start : last - start] = values[entry.name][first - entry.span[0] : last - entry.span[0]]
    for (index, key), joined in flat.items():
        shard = sharded.shards[index]
        is_own = windows[index] == shard.range and not shard.is_whole and strides[index] == shard.parameter.stride()
        whole = None if is_own else joined.as_strided(shard.parameter.size(), strides[index])
        state[index][key] = joined if whole is None else piece_of(shard, whole)
    return state


def _check_sizes(sharded: ShardedState, manifest: Mapping[str, Any]) -> None:
    here = _sizes(sharded)
    if manifest["groups"] != here["groups"]:
        raise ConfigurationError(
            f"the checkpoint has groups of {manifest['groups']} parameters, but this optimizer has {here['groups']}"
        )
    for shard, saved, shape in zip(sharded.shards, manifest["shapes"], here["shapes"], strict=True):
        if saved != shape:
            raise ConfigurationError(f"{shard.name}: its shape in the checkpoint is {saved}, here {shape}")


def _to_tensor(value: Any) -> Tensor:
    """The pickled value.

    Raises:
        UnsupportedError: :func:`_from_tensor` could not read it.
    """
    buffer = io.BytesIO()
    torch.save(value, buffer)
    tensor = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    try:
        _from_tensor(tensor)
    except pickle.UnpicklingError as error:
        raise UnsupportedError(
            f"{value!r} has values that torch.load(weights_only=True) does not read: keep numbers, strings and tensors "
            f"in the options and the state, or torch.serialization.add_safe_globals([...]) their classes ({error})"
        ) from error
    return tensor


def _from_tensor(tensor: Tensor) -> Any:
    return torch.load(io.BytesIO(tensor.numpy().tobytes()), weights_only=True)


def check_part(sharded: ShardedState, saved: Mapping[str, Any], order: Order) -> None:
    """Raises: ConfigurationError: this rank owned other elements when ``vars(part)`` was ``saved``."""
    then = _reordered(saved, order)
    for index, shard in enumerate(sharded.shards):
        for name, before, now in (
            ("range", then.ranges[index], shard.range),
            ("strides", then.strides[index], shard.parameter.stride()),
            ("dtype", then.dtypes[index], shard.dtype),
            ("partition", then.partition, sharded.partition),
        ):
            if before != now:
                raise ConfigurationError(
                    f"this rank's share of {shard.name} of shape {tuple(shard.parameter.shape)} is not the one that "
                    f"was saved ({name}: {before} then, {now} now): use the same partition, master_dtype, order of "
                    "parameters and memory format, or a sharded_state_dict() of that run"
                )


def load_part(sharded: ShardedState, saved: Mapping[str, Any], order: Order) -> None:
    """Load a ``saved`` part that :func:`check_part` has passed, after the model's parameters."""
    part = _reordered(saved, order)
    sharded.load(replace(part, state=cloned(part.state)))


def part_from_all(sharded: ShardedState, saved: Sequence[Mapping[str, Any]], order: Order) -> Part:
    """This rank's part, from the parts that all old ranks have saved by themselves.

    Args:
        sharded: of the optimizer that is going to load it.
        saved: ``vars(part)`` of each old rank, in their order.
        order: the places of the parameters of ``sharded`` in these parts.

    Raises:
        ConfigurationError: the parts do not belong together.
    """
    parts = [_reordered(one, order) for one in saved]
    first = next((part for part in parts if part.steps), parts[0])
    ranges = list(zip(*(part.ranges for part in parts), strict=True))
    described = [{(None, "partition"): part.partition} | sharded.described(part) for part in parts]
    if found := difference(described, ranges=ranges):
        (index, key), values = found
        of = "" if index is None else f" of {sharded.shards[index].name}"
        raise ConfigurationError(
            f"the states of a ZeroRedundancyOptimizer do not belong together: {key!r}{of} differs between the old "
            f"ranks: {values}"
        )
    state = dict(first.beside)
    for index, shard in enumerate(sharded.shards):
        of_ranks = [part.state.get(index) for part in parts]
        if first.is_cut(shard):
            whole = assemble(of_ranks, ranges[index], shard.parameter.size(), first.strides[index])
        else:
            whole = dict(next((one for one in of_ranks if one), {}))
        if whole:
            state[index] = whole
    places = itertools.count()
    groups = [
        {**options, "params": list(itertools.islice(places, len(group["params"])))}
        for group, options in zip(sharded.param_groups, first.options, strict=True)
    ]
    return sharded.divided({**first.entries, "state": state, "param_groups": groups}, dtypes=first.dtypes)


def _reordered(saved: Mapping[str, Any], order: Order) -> Part:
    """A saved part with its parameters in another order."""
    if set(saved) != {field.name for field in fields(Part)}:
        raise ConfigurationError(
            "the state of a ZeroRedundancyOptimizer was saved by an earlier version of overlap: load it there, and "
            "save zero.sharded_state_dict(), which every version loads"
        )
    part = Part(**saved)
    starts = itertools.accumulate((len(places) for places in order), initial=0)
    flat = [start + place for start, places in zip(starts, order, strict=False) for place in places]
    return replace(
        part,
        ranges=[part.ranges[place] for place in flat],
        strides=[part.strides[place] for place in flat],
        dtypes=[part.dtypes[place] for place in flat],
        state={new: part.state[old] for new, old in enumerate(flat) if old in part.state},
    )
