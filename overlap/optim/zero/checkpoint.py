"""The state of this rank's chunks as it is saved, and the same of other chunks.

A rank saves the form of the plain optimizer's ``state_dict()``, with the values of its chunks in the place of whole
ones: values of the chunk's shape have one value for each element, and others are the same on every rank that has them.
Beside it are the *places* of chunks in the memory of their parameters, and the order of that memory. Chunks are put
together to those of another number of ranks, or to the state of whole parameters, as that of the plain optimizer. The
folder of :func:`overlap.save` has them in boxes of the parameter's own shape.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap._torch.c10d import side_group
from overlap.errors import ConfigurationError
from overlap.optim.zero.shards import Range, Shard, copy_options, flatten, options_of
from overlap.optim.zero.state import check_divisible, is_per_element, tensors_in
from overlap.ranks.board import Agreement
from overlap.ranks.values import mapped, receive, send, snapshot, split

Place = Sequence[Any]
"""The first element of a chunk in the memory of its parameter, and the chunk's shape."""
Own = Mapping[str, Any]
"""The ``state`` of a rank, the ``places`` of its chunks, and the ``strides`` of all parameters, which are known by
their numbers."""

# The key of a parameter's master, its copy in a wider dtype.
_MASTER = "master_param"
# As version 0.1.0 named the values of a rank: ``3/exp_avg/0:512``, and ``3/step``.
_NAME = re.compile(r"(?P<index>\d+)/(?P<key>.+?)(?:/(?P<start>\d+):\d+)?")
_NO_STATE = "has no state yet: save with overlap.save(folder, ddp, zero), and load with overlap.load(folder, ddp, zero)"
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

    def cut(self) -> dict[str, Any]:
        """The places of this rank's chunks, and the strides of all parameters."""
        owned = {index: shard.own for index, shard in enumerate(self.shards) if shard.own is not None}
        places = {index: (_elements_of(self.shards[index])[0], list(own.shape)) for index, own in owned.items()}
        return {"places": places, "strides": [list(shard.parameter.stride()) for shard in self.shards]}

    def _without_values(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """The state that belongs to no parameter."""
        return {key: value for key, value in state.items() if key not in range(len(self.shards))}

    # Saving.

    def own(self) -> dict[str, Any]:
        """This rank's state, not copied.

        Raises:
            UnsupportedError: a value of a parameter that is cut cannot be divided.
        """
        saved, cut = self.optimizer.state_dict(), self.cut()
        state = {key: value for key, value in saved["state"].items() if key not in range(len(cut["places"]))}
        for number, index in enumerate(cut["places"]):  # Chunks are in the order of their parameters.
            shard, its = self.shards[index], saved["state"].get(number, {})
            check_divisible(self.optimizer, shard, its, cut["places"][index][1])
            state[index] = {**its, _MASTER: shard.own} if shard.has_master else its
        strides = [list(shard.strides) for shard in self.shards]
        whole = {**entries_of(saved), "state": state, "param_groups": numbered(self.param_groups)}
        return {**cut, "state": whole, "strides": strides}

    def without_values(self) -> dict[str, Any]:
        """The consolidated state of an optimizer that has none of any parameter.

        ``torch.distributed.checkpoint.load`` loads the entries that it finds in a ``state_dict()``, here none;
        with this one, which no checkpoint has, it fails.
        """
        saved = self.own()["state"]
        return {**entries_of(saved), "state": self._without_values(saved["state"]), _NO_STATE: None}

    def consolidate(self, to: int | None, agreement: Agreement) -> dict[str, Any] | None:
        """Put the state together in the form of the plain optimizer on rank ``to``, or on all ranks, to which each rank
        sends its tensors of one block of parameters after another; ``None`` on the other ranks. The groups are left
        out.

        Raises:
            ConfigurationError: there is no rank ``to``, or a value is neither tensors nor plain values.
        """
        own, rank, ranks = self.own(), self.process_group.rank(), self.process_group.size()
        if to is not None and not 0 <= to < ranks:
            raise ConfigurationError(
                f"consolidate_state_dict(to={to}): ranks of the group are 0 to {ranks - 1}, and None stands for all"
            )
        state = own["state"]["state"]
        split({**entries_of(own["state"]), "state": state}, "zero.state")
        agreement.agree()
        group, root, others = side_group(self.process_group), to or 0, [n for n in range(ranks) if n != (to or 0)]
        ends_bytes = itertools.accumulate(shard.parameter.nbytes for shard in self.shards)
        blocks = itertools.groupby(enumerate(ends_bytes), key=lambda one: one[1] // _BLOCK_BYTES)
        whole: dict[Any, Any] = {}
        for indexes in [[], *([index for index, _ in block] for _, block in blocks)]:
            # First the state that belongs to no parameter, and then each block.
            mine: dict[Any, Any] = {n: [own["places"][n], state[n]] for n in indexes if n in own["places"]}
            if not indexes:
                mine = {**entries_of(own["state"]), "state": self._without_values(state)}
            if rank != root:
                send(mine, root, group)
                whole |= receive(root, group) if to is None else {}
                continue
            of_ranks = {**{one: receive(one, group) for one in others}, rank: snapshot(mine)}
            found = self._whole(indexes, [of_ranks[one] for one in sorted(of_ranks)])
            for one in others if to is None else ():
                send(found, one, group)
            whole |= found
        if (failure := whole.pop("failure", None)) is not None:
            raise ConfigurationError(failure)
        states = {index: whole.pop(index) for index in range(len(self.shards)) if index in whole}
        return {**whole, "state": {**whole["state"], **states}} if whole else None

    def _whole(self, indexes: Sequence[int], of_ranks: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
        """The state of whole parameters from the chunks of all ranks; without ``indexes`` the state that belongs to no
        parameter, of the first rank, which has something to step, as such state may need."""
        if not indexes:
            return of_ranks[0]
        try:
            states = {n: self._joined([one[n] for one in of_ranks if n in one], n, is_whole=True) for n in indexes}
        except ConfigurationError as error:  # On all ranks, when nothing more is sent.
            return {"failure": str(error)}
        return {index: state for index, state in states.items() if state}

    def merged(self, owns: Sequence[Own]) -> dict[str, Any]:
        """This rank's state from those of all ranks, whatever their number was.

        Raises:
            ConfigurationError: they are of other parameters, or elements are missing.
        """
        first, cut = owns[0]["state"], self.cut()
        self._check_strides(owns[0]["strides"])
        state = self._without_values(first["state"])
        for index in cut["places"]:
            chunks = ((own["places"][index], own["state"]["state"][index]) for own in owns if index in own["places"])
            state[index] = self._joined(chunks, index)
        return {**cut, "state": {**first, "state": state}}

    def _joined(self, chunks: Iterable[Sequence[Any]], index: int, *, is_whole: bool = False) -> dict[str, Any]:
        """The state of this rank's chunk of a parameter, or of the ``is_whole`` parameter, from any chunks, each of
        which is given by its place and its state.

        Raises:
            ConfigurationError: elements are missing.
        """
        shard, state, flat = self.shards[index], dict[str, Any](), dict[str, Tensor]()
        start, end = _elements_of(shard, is_whole=is_whole)
        # The state of a whole parameter is in the order that its memory had, to be loaded in the order that it has.
        strides, missing = shard.strides if is_whole else shard.parameter.stride(), dict[str, int]()
        for (begin, shape), values in chunks:
            first, last = max(start, begin), min(end, begin + math.prod(shape))
            for key, value in values.items():
                if not is_per_element(value, shape):
                    # Pickling or copying a view deeply would take all of its memory.
                    state[key] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
                    continue
                if key not in flat:
                    flat[key], missing[key] = value.new_empty(end - start), end - start
                    is_shaped = is_whole or shard.is_whole
                    state[key] = flat[key].as_strided(shard.parameter.size(), strides) if is_shaped else flat[key]
                if first < last:
                    whole = in_memory_order(value, strides)
                    flat[key][first - start : last - start] = whole[first - begin : last - begin]
                    missing[key] -= last - first
        for key, numel in missing.items():
            if numel:
                raise ConfigurationError(
                    f"{numel} elements of {key!r} of {shard.name} of shape {tuple(shard.parameter.shape)} are missing"
                )
        return state

    # Loading.

    def check(self, own: Own) -> None:
        """Raises: ConfigurationError: ``own`` is of other parameters, or of other elements of them."""
        self._check_strides(own["strides"])
        for index, (start, shape) in self.cut()["places"].items():
            shard, place = self.shards[index], own["places"].get(index, (None, ()))
            if (place[0], list(place[1])) != (start, shape):
                raise ConfigurationError(
                    f"this rank's share of {shard.name} of shape {tuple(shard.parameter.shape)} is not the one that "
                    "was saved: use the same partition, order of parameters, memory format and number of ranks, or the "
                    "states of all ranks"
                )
            state = own["state"]["state"].get(index, {})
            if (master := state.get(_MASTER)) is not None and not shard.has_master:
                raise _has_master(shard.name, master)
            check_divisible(self.optimizer, shard, state, shape)

    @torch.no_grad()
    def load(self, own: Own) -> None:
        """Replace the state, masters and hyperparameters of this rank by ``own``, which has passed :meth:`check` and is
        kept, after the model's parameters."""
        saved, loaded = own["state"], self.optimizer.state_dict()
        states = copy.deepcopy(self._without_values(saved["state"]))
        for shard in self.shards:
            shard.follow()
        for number, index in enumerate(self.cut()["places"]):
            shard, its = self.shards[index], dict(saved["state"].get(index, {}))
            master, chunk = its.pop(_MASTER, None), shard.own
            assert chunk is not None, "it has a place"
            if shard.has_master:
                chunk.copy_(shard.shaped(shard.view) if master is None else master)
            # Moments of a parameter in another dtype are then those of the master.
            is_as_saved = chunk.dtype == (shard.parameter.dtype if master is None else master.dtype)
            if its:
                states[number] = its if is_as_saved else {key: _moment(its[key], key, chunk) for key in its}
        loaded |= {**copy.deepcopy(entries_of(saved)), "state": states}
        for group, options in zip(loaded["param_groups"], saved["param_groups"], strict=True):
            group.update(options_of(options))
        load_as_saved(self.optimizer, loaded)
        copy_options(self.optimizer.param_groups, self.param_groups)

    def load_whole(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a state in the form of the plain optimizer.

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
        then, here = ([len(group["params"]) for group in one] for one in (groups, self.param_groups))
        if then != here:
            raise ConfigurationError(f"the checkpoint has groups of {then} parameters, but this optimizer has {here}")
        keys = [key for group in groups for key in group["params"]]
        state = {key: value for key, value in state_dict["state"].items() if key not in keys}
        places = {}
        for index, (shard, key) in enumerate(zip(self.shards, keys, strict=True)):
            state[index], shape = state_dict["state"].get(key, {}), shard.parameter.shape
            check_divisible(self.optimizer, shard, state[index], shape)
            places[index] = 0, shape
        whole = {**entries_of(state_dict), "state": state, "param_groups": groups}
        own = self.merged([{**self.cut(), "places": places, "state": whole}])
        self.check(own)
        self.load(own)

    def _check_strides(self, saved: Sequence[Sequence[int]]) -> None:
        for shard, strides in zip(self.shards, saved, strict=True):
            # Shapes are compared with the model's.
            here = zip(shard.parameter.shape, strides, shard.parameter.stride(), strict=False)
            if any(length != 1 and there != own for length, there, own in here):
                raise ConfigurationError(
                    f"{shard.name}: its strides in the checkpoint are {strides}, here "
                    f"{shard.parameter.stride()}: bring the model into that memory format, or load a consolidated "
                    "state_dict() instead"
                )


def _elements_of(shard: Shard, *, is_whole: bool = False) -> Range:
    """The elements of ``shard`` in this rank's state, or in that of the ``is_whole`` parameter."""
    return (0, shard.parameter.numel()) if is_whole or shard.is_whole else shard.range


def of_version_0_1_0(own: Mapping[str, Any]) -> Own:
    """A state that version 0.1.0 has saved, with flat chunks."""
    manifest, places = own["manifest"], dict[int, Place]()
    state = dict(manifest["state"])
    for match in filter(None, map(_NAME.fullmatch, own)):
        index, value = int(match["index"]), own[match[0]]
        state.setdefault(index, {})[match["key"]] = value
        if match["start"] is not None:
            places[index] = int(match["start"]), list(value.shape)
        places.setdefault(index, (0, [0]))
    groups = [
        {**options, "params": range(length)}
        for options, length in zip(manifest["options"], manifest["groups"], strict=True)
    ]
    whole = {**manifest["entries"], "state": state, "param_groups": numbered(groups)}
    return {"places": places, "strides": manifest["strides"], "state": whole}


def in_memory_order(value: Tensor, strides: Sequence[int]) -> Tensor:
    """A value per element of a parameter with these ``strides``, or of a flat part of it, flat in the order of the
    parameter's memory."""
    if value.dim() == len(strides) and value.stride() != tuple(strides):
        value = torch.empty_strided(value.size(), tuple(strides), dtype=value.dtype, device=value.device).copy_(value)
    return flatten(value)


def numbered(param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups with the numbers of their parameters, as in an optimizer's ``state_dict()``."""
    numbers = itertools.count()
    return [{**group, "params": list(itertools.islice(numbers, len(group["params"])))} for group in param_groups]


def packed(whole: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A consolidated state with these groups as the plain optimizer's ``state_dict()``, which the caller may change."""
    found: dict[str, Any] = mapped(
        {**whole, "param_groups": numbered(param_groups)}, lambda one: one, "zero.state_dict()"
    )
    return found


def entries_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of an optimizer's ``state_dict()`` beside state and groups."""
    return {key: value for key, value in state_dict.items() if key not in ("state", "param_groups", _NO_STATE)}


def _moment(value: Any, key: str, chunk: Tensor) -> Any:
    """A value of the state of ``chunk`` in its dtype, but for counters, numbers and codes."""
    is_cast = (
        isinstance(value, Tensor) and value.is_floating_point() and (value.numel() > 1 or value.shape == chunk.shape)
    )
    return value.to(chunk.dtype) if is_cast and key != "step" else value


def _has_master(name: str, master: Tensor) -> ConfigurationError:
    return ConfigurationError(
        f"the state has a copy of {name} in {master.dtype}, from which it was stepped, and this optimizer keeps none: "
        f"give ZeroRedundancyOptimizer master_dtype={master.dtype}, with parameters of the dtype that they had"
    )


def check_no_masters(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Raises: ConfigurationError: a state for a plain ``optimizer`` is of one that stepped copies in another dtype."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = saved.get("state")
    for number, parameter in enumerate(parameters):
        its = states.get(number) if isinstance(states, Mapping) else None
        master = its.get(_MASTER) if isinstance(its, Mapping) else None
        if isinstance(master, Tensor) and master.dtype != parameter.dtype:
            raise _has_master(f"parameter {number}", master)


def _moved(value: Any, *, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def load_as_saved(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """``optimizer.load_state_dict``, which takes strings for sequences and casts state to the parameter's dtype; then
    these values as they were saved."""
    optimizer.load_state_dict(dict(saved))
    if not {"state", "param_groups"} <= set(saved):
        return  # A form of the optimizer's own.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    for parameter, number in zip(parameters, keys, strict=True):
        loaded = optimizer.state.get(parameter, {})
        for key, value in saved["state"].get(number, {}).items():
            now = loaded.get(key)
            if isinstance(value, (str, dict, list, tuple)):
                move = partial(_moved, device=parameter.device)
                loaded[key] = mapped(value, move, f"state[{key!r}]") if tensors_in(value) else value
            elif key == "step" or not isinstance(value, Tensor) or not isinstance(now, Tensor):
                continue
            elif now.dtype == parameter.dtype != value.dtype:
                loaded[key] = value.to(now.device)
