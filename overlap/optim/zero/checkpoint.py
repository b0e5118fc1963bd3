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
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from overlap.errors import ConfigurationError, UnsupportedError
from overlap.optim.zero.packed_state import Order, cloned
from overlap.optim.zero.shards import flatten
from overlap.optim.zero.state import (
    Part,
    ShardedState,
    assemble,
    check_divisible,
    difference,
    is_per_element,
    packed,
    piece_of,
)

__all__ = ["check_part", "load_part", "load_pieces", "part_from_all", "pieces_to_save"]

_MANIFEST = "manifest"

# In a name, instead of elements: the value is not a tensor, and is saved in the form of one.
_PACKED = "packed"


def pieces_to_save(sharded: ShardedState) -> dict[str, Any]:
    """This rank's part of the state by name, as views if possible. Communication: one gather of a few bytes per
    value."""
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
                saved[f"{index}/{key}/{start}:{end}"] = flatten(piece_of(shard, value)) if shard.is_whole else value
    return saved


def _sizes(sharded: ShardedState) -> dict[str, Any]:
    return {
        "groups": [len(group["params"]) for group in sharded.param_groups],
        "shapes": [list(shard.parameter.shape) for shard in sharded.shards],
    }


# ``3/exp_avg/0:512``: the parameter, the key of its state, and the elements, or _PACKED, of a value that is not whole.
_NAME = re.compile(rf"(?P<index>\d+)/(?P<key>.+?)(?:/(?:(?P<start>\d+):(?P<end>\d+)|(?P<packed>{_PACKED})))?")


def load_pieces(sharded: ShardedState, checkpoint: Any, key: str) -> None:
    """Load this rank's part of a state that any number of ranks has saved."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(checkpoint) if isinstance(checkpoint, (str, os.PathLike)) else checkpoint
    prefix = f"{key}." if key else ""
    try:
        saved: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    except FileNotFoundError as error:
        raise ConfigurationError(f"{checkpoint} is not a checkpoint saved by torch.distributed.checkpoint") from error
    place = saved.get(prefix + _MANIFEST)
    if not isinstance(place, TensorStorageMetadata):
        raise ConfigurationError(
            f"{checkpoint} has no {prefix + _MANIFEST!r}: no sharded_state_dict() was saved under key={key!r}"
        )
    found: dict[str, Any] = {prefix + _MANIFEST: torch.empty(place.size, dtype=torch.uint8, device="cpu")}
    load(found, storage_reader=reader, process_group=sharded.process_group)
    manifest = _from_tensor(found[prefix + _MANIFEST])
    _check_sizes(sharded, manifest)

    # To read into; then values as they are, and of each value that is cut the pieces to copy.
    wanted: dict[str, Any] = {}
    state: dict[int, dict[str, Any]] = {}
    joined: dict[tuple[int, str], Tensor] = {}
    copies: list[tuple[Tensor, str, slice]] = []
    for name, metadata in saved.items():
        match = _NAME.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if match is None or (shard := sharded.shards[int(match["index"])]).own is None:
            continue
        index, key = int(match["index"]), match["key"]
        is_tensor = isinstance(metadata, TensorStorageMetadata)
        target = torch.empty(metadata.size, dtype=metadata.properties.dtype, device="cpu") if is_tensor else None
        values = state.setdefault(index, {})
        if match["start"] is None:
            wanted[name], values[key] = target, match
            continue
        # In another order of memory the elements of this rank may be anywhere.
        is_all = shard.is_whole or tuple(manifest["strides"][index]) != shard.parameter.stride()
        start, end = (0, shard.parameter.numel()) if is_all else shard.range
        if (index, key) not in joined:
            joined[index, key] = torch.empty(end - start, dtype=metadata.properties.dtype, device="cpu")
        first, last = int(match["start"]), int(match["end"])
        one, other = max(start, first), min(end, last)
        if one < other:
            wanted[name] = target
            copies.append((joined[index, key][one - start : other - start], name, slice(one - first, other - first)))
    load(wanted, storage_reader=reader, process_group=sharded.process_group)
    for index, values in state.items():
        for key, match in values.items():
            value = wanted[prefix + match.string]
            values[key] = _from_tensor(value) if match["packed"] else value
            if not (shard := sharded.shards[index]).is_whole:
                check_divisible(sharded.optimizer, shard, key, values[key], shard.parameter.shape)
    for piece, name, elements in copies:
        piece.copy_(wanted[name][elements])
    for (index, key), flat in joined.items():
        shard, strides = sharded.shards[index], manifest["strides"][index]
        is_all = flat.numel() == shard.parameter.numel()
        state[index][key] = piece_of(shard, flat.as_strided(shard.parameter.size(), strides)) if is_all else flat
    sharded.load(
        # Earlier versions have saved neither dtypes nor what belongs to no parameter.
        sharded.loadable(
            dtypes=manifest.get("dtypes"),
            state=state,
            options=manifest["options"],
            beside=manifest.get("state", {}),
            entries=manifest.get("entries", {}),
        )
    )


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
    """The pickled value. Raises: UnsupportedError: :func:`_from_tensor` could not read it."""
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
        before = (then.ranges[index], then.strides[index], then.dtypes[index], then.partition)
        now = (shard.range, shard.parameter.stride(), shard.dtype, sharded.partition)
        if before != now:
            raise ConfigurationError(
                f"this rank's share of {shard.name} of shape {tuple(shard.parameter.shape)} is not the one that was "
                f"saved (range, strides, dtype and partition {before} then, {now} now): use the same partition, "
                "master_dtype, order of parameters and memory format, or a sharded_state_dict() of that run"
            )


def load_part(sharded: ShardedState, saved: Mapping[str, Any], order: Order) -> None:
    """Load a ``saved`` part that :func:`check_part` has passed, after the model's parameters."""
    part = _reordered(saved, order)
    sharded.load(replace(part, state=cloned(part.state)))


def part_from_all(sharded: ShardedState, saved: Sequence[Mapping[str, Any]], order: Order) -> Part:
    """This rank's part, from ``vars(part)`` of all old ranks, in which the parameters have this ``order``.

    Raises:
        ConfigurationError: the parts do not belong together.
    """
    parts = [_reordered(one, order) for one in saved]
    first = next((part for part in parts if part.steps), parts[0])
    ranges = list(zip(*(part.ranges for part in parts), strict=True))
    described = [sharded.described(part) for part in parts]
    for part, one in zip(parts, described, strict=True):
        one.setdefault(None, {})["partition"] = part.partition
    if found := difference(described, ranges):
        index, key, values = found
        of = "" if index is None else f" of {sharded.shards[index].name}"
        raise ConfigurationError(
            f"the states of a ZeroRedundancyOptimizer do not belong together: {key!r}{of} differs between the old "
            f"ranks: {values}"
        )
    state = dict(first.beside)
    for index, shard in enumerate(sharded.shards):
        of_ranks = [part.state.get(index) for part in parts]
        whole = assemble(shard, of_ranks, ranges[index], first.strides[index], is_cut=first.is_cut(shard))
        if whole:
            state[index] = whole
    groups = [
        {**options, "params": group["params"]}
        for group, options in zip(sharded.param_groups, first.options, strict=True)
    ]
    return sharded.divided(packed({**first.entries, "state": state}, groups), dtypes=first.dtypes)


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
