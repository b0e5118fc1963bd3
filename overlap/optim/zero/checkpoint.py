"""The state in the form for ``torch.distributed.checkpoint``: every rank writes its part.

A value with one element for every element of a parameter is saved in pieces, one per rank, as plain tensors whose names
say which elements they hold: ``3/exp_avg/0:512``.
A reader with another number of ranks finds the pieces that overlap with what it owns, and reads only these.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overlap.errors import ConfigurationError, UnsupportedError
from overlap.optim.zero.kinds import Kind, StateValue
from overlap.optim.zero.parameter_groups import options_of
from overlap.optim.zero.partition import Range
from overlap.optim.zero.plain_values import as_plain
from overlap.optim.zero.sharding import Shard, flatten
from overlap.optim.zero.state import GlobalState, ShardedState

__all__ = ["load_pieces", "pieces_to_save"]

_MANIFEST = "manifest"

# Where a name says which elements it holds, one with this has a value that is not a tensor, in the form of a tensor.
_PACKED = "packed"


def pieces_to_save(sharded: ShardedState) -> dict[str, Any]:
    """This rank's part of the state by name, as views if possible.

    Issues: one gather of a few bytes per value, since of a value that all ranks have only one is saved.
    """
    local = sharded.local()
    saved: dict[str, Any] = {_MANIFEST: _to_tensor(_manifest(sharded, local.agree()))}
    for index, shard in enumerate(sharded.shards.values()):
        start, end = (0, shard.parameter.numel()) if shard.is_whole else shard.range
        for key, (kind, value) in local.of(shard).items():
            if isinstance(value, (dict, list, tuple)):
                saved[f"{index}/{key}/{_PACKED}"] = _to_tensor(as_plain(value))
            elif kind is Kind.BY_PARAMETER:
                saved[f"{index}/{key}"] = as_plain(value)
            # An empty piece is written only if there is no other one to show that the value exists.
            elif start < end or (shard.parameter.numel() == 0 and sharded.process_group.rank() == 0):
                saved[f"{index}/{key}/{start}:{end}"] = _in_order_of_memory(shard, value)
    return saved


def _in_order_of_memory(shard: Shard, value: Tensor) -> Tensor:
    if not shard.is_whole:
        return value
    return flatten(torch.empty_like(shard.parameter, dtype=value.dtype, requires_grad=False).copy_(value))


def _manifest(sharded: ShardedState, shared: GlobalState) -> dict[str, Any]:
    return {
        "state": as_plain(shared.state),
        "entries": as_plain(shared.entries),
        "dtypes": [shard.dtype for shard in sharded.shards.values()],
        **_shape_of(sharded),
    }


def _shape_of(sharded: ShardedState) -> dict[str, Any]:
    return {
        "options": [as_plain(options_of(group)) for group in sharded.param_groups],
        "groups": [len(group["params"]) for group in sharded.param_groups],
        "shapes": [list(shard.parameter.shape) for shard in sharded.shards.values()],
        "strides": [list(shard.parameter.stride()) for shard in sharded.shards.values()],
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

    def target(self) -> Any:
        """The tensor to read into."""
        if _is_tensor(self.metadata):
            return torch.empty(self.metadata.size, dtype=self.metadata.properties.dtype)
        return None


def _is_tensor(metadata: Any) -> bool:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    return isinstance(metadata, TensorStorageMetadata)


def load_pieces(sharded: ShardedState, checkpoint: Any, key: str) -> None:
    """Read the state of what this rank owns now, saved by any number of ranks."""
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
    shards = list(sharded.shards.values())
    _check(sharded, manifest)
    entries = [
        _Entry.parse(name, prefix, metadata)
        for name, metadata in saved.items()
        if name.startswith(prefix) and name != prefix + _MANIFEST and "/" in name.removeprefix(prefix)
    ]
    entries = [entry for entry in entries if shards[entry.index].own is not None]
    strides = [tuple(saved) for saved in manifest["strides"]]
    wanted = [entry for entry in entries if _is_needed(entry, shards[entry.index], strides[entry.index])]
    values: dict[str, Any] = {entry.name: entry.target() for entry in wanted}
    load(values, storage_reader=reader, process_group=sharded.process_group)
    values.update((entry.name, _from_tensor(values[entry.name])) for entry in wanted if entry.is_packed)
    _check_kinds(sharded, wanted, values)
    # What was saved by earlier versions has no global state and no dtypes.
    shared = GlobalState(manifest.get("state", {}), manifest.get("entries", {}))
    dtypes = {id(shard): dtype for shard, dtype in zip(shards, manifest.get("dtypes", ()), strict=False)}
    sharded.replace(_join(entries, values, shards, strides), manifest["options"], shared, dtypes=dtypes)


def _check_kinds(sharded: ShardedState, wanted: Sequence[_Entry], values: Mapping[str, Any]) -> None:
    """Raises: UnsupportedError: a value was saved with whole parameters, and cannot be divided into chunks."""
    shards = list(sharded.shards.values())
    whole = [
        StateValue(shards[entry.index].name, tuple(shards[entry.index].parameter.shape), entry.key, values[entry.name])
        for entry in wanted
        if entry.span is None
    ]
    kinds = sharded.kinds(whole)
    for value in whole:
        kinds.of(value)


def _is_needed(entry: _Entry, shard: Shard, strides: tuple[int, ...]) -> bool:
    # In another order, what this rank owns may be anywhere.
    is_permuted = strides != shard.parameter.stride()
    return entry.span is None or is_permuted or (entry.span[0] < shard.range[1] and shard.range[0] < entry.span[1])


def _join(
    entries: Sequence[_Entry],
    values: Mapping[str, Any],
    shards: Sequence[Shard],
    strides: Sequence[tuple[int, ...]],
) -> dict[int, dict[str, Any]]:
    """The state of what this rank owns of each shard, put together from pieces; ``strides`` are those at saving."""
    states: dict[int, dict[str, Any]] = {}
    in_another_order: dict[tuple[int, str], Tensor] = {}
    for entry in entries:
        shard = shards[entry.index]
        state = states.setdefault(id(shard), {})
        if entry.span is None:
            state[entry.key] = values[entry.name]
            continue
        if strides[entry.index] != shard.parameter.stride():
            empty = torch.empty(shard.parameter.numel(), dtype=entry.metadata.properties.dtype)
            whole = in_another_order.setdefault((entry.index, entry.key), empty)
            whole[entry.span[0] : entry.span[1]] = values[entry.name]
            continue
        if entry.key not in state:
            assert shard.own is not None, "entries are only of shards of which this rank has a part"
            dtype = entry.metadata.properties.dtype
            state[entry.key] = torch.empty_like(shard.own, dtype=dtype, device="cpu")
        if entry.name in values:
            (start, end), (begin, stop) = shard.range, entry.span
            first, last = max(start, begin), min(end, stop)
            flatten(state[entry.key])[first - start : last - start] = values[entry.name][first - begin : last - begin]
    for (index, key), flat in in_another_order.items():
        states[id(shards[index])][key] = _reordered(shards[index], flat, strides[index])
    return states


def _reordered(shard: Shard, flat: Tensor, strides: tuple[int, ...]) -> Tensor:
    """What this rank owns of a value that was saved in the order of other strides."""
    whole = torch.empty_like(shard.parameter, dtype=flat.dtype, device="cpu", requires_grad=False)
    whole.copy_(flat.as_strided(whole.size(), strides))
    return whole if shard.is_whole else flatten(whole)[shard.range[0] : shard.range[1]].clone()


def _check(sharded: ShardedState, manifest: Mapping[str, Any]) -> None:
    mine = _shape_of(sharded)
    if manifest["groups"] != mine["groups"]:
        raise ConfigurationError(
            f"the checkpoint has groups of {manifest['groups']} parameters, but this optimizer has {mine['groups']}"
        )
    for shard, saved, here in zip(sharded.shards.values(), manifest["shapes"], mine["shapes"], strict=True):
        if saved != here:
            raise ConfigurationError(f"{shard.name}: its shape in the checkpoint is {saved}, here {here}")


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
