"""The state of this rank's chunks as it is saved, in pieces, and the same of other chunks.

A *piece* of a parameter has the state of some of its elements, from ``start`` on in the order of its memory, as the
optimizer of these has it: values of ``shape`` have one value for each element, and others are the same on every rank
that has them. A rank saves a piece of each parameter that it has a part of, and a manifest of all that belongs to no
parameter. Pieces are put together to those of another number of ranks, or to the state of whole parameters, as that of
the plain optimizer. The folder of :func:`overlap.save` has them in boxes of the parameter's own shape.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
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
from overlap.ranks.board import Agreement
from overlap.ranks.values import mapped, receive, send, snapshot, split

Piece = Mapping[str, Any]
Own = Mapping[str, Any]
"""A ``manifest``, and ``pieces`` by the places of their parameters."""

# The key of a parameter's master, its copy in a wider dtype.
_MASTER = "master_param"
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

    @property
    def _chunks(self) -> list[Tensor]:
        return [chunk for group in self.optimizer.param_groups for chunk in group["params"]]

    def pieces(self, states: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """A piece for each of this rank's chunks, with ``states`` by the places of their parameters."""
        return {
            index: {
                "start": _elements_of(shard)[0],
                "shape": list(shard.own.shape),
                "state": dict(states.get(index, {})),
            }
            for index, shard in enumerate(self.shards)
            if shard.own is not None
        }

    # Saving.

    def own(self) -> dict[str, Any]:
        """This rank's state, not copied.

        Raises:
            UnsupportedError: a value of a parameter that is cut cannot be divided.
        """
        own, chunks = self.optimizer.state_dict(), self._chunks
        places, states = {id(chunk): place for place, chunk in enumerate(chunks)}, dict[int, Mapping[str, Any]]()
        for index, shard in enumerate(self.shards):
            if shard.own is not None:
                state = own["state"].get(places[id(shard.own)], {})
                check_divisible(self.optimizer, shard, state, shard.own.shape)
                states[index] = {**state, _MASTER: shard.own} if shard.has_master else state
        manifest = self.manifest(
            state={key: value for key, value in own["state"].items() if key not in range(len(chunks))},
            entries=entries_of(own),
            groups=self.param_groups,
            dtypes=[shard.dtype for shard in self.shards],
        )
        manifest["strides"] = [list(shard.strides) for shard in self.shards]
        return {"manifest": manifest, "pieces": self.pieces(states)}

    def without_values(self) -> dict[str, Any]:
        """The consolidated state of an optimizer that has none of any parameter.

        ``torch.distributed.checkpoint.load`` loads the entries that it finds in a ``state_dict()``, here none;
        with this one, which no checkpoint has, it fails.
        """
        manifest = self.own()["manifest"]
        return {"state": dict(manifest["state"]), **manifest["entries"], _NO_STATE: None}

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
        split(own, "zero.state")
        agreement.agree()
        group, root, others = side_group(self.process_group), to or 0, [n for n in range(ranks) if n != (to or 0)]
        ends_bytes = itertools.accumulate(shard.parameter.nbytes for shard in self.shards)
        blocks = itertools.groupby(enumerate(ends_bytes), key=lambda one: one[1] // _BLOCK_BYTES)
        whole: dict[Any, Any] = {}
        for indexes in [[], *([index for index, _ in block] for _, block in blocks)]:
            # First the manifest, and then each block.
            mine = {index: own["pieces"][index] for index in indexes if index in own["pieces"]}
            mine = mine if indexes else own["manifest"]
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
        rest = {key: whole.pop(key) for key in ("state", "entries") if key in whole}
        return {**rest["entries"], "state": {**rest["state"], **whole}} if rest else None

    def _whole(self, indexes: Sequence[int], of_ranks: Sequence[Mapping[Any, Any]]) -> dict[Any, Any]:
        """The state of whole parameters from the pieces of all ranks; without ``indexes`` the state that belongs to no
        parameter, of the first rank, which has something to step, as such state may need."""
        if not indexes:
            return {key: of_ranks[0][key] for key in ("state", "entries")}
        try:
            states = {n: self._cut([one[n] for one in of_ranks if n in one], n, is_whole=True) for n in indexes}
        except ConfigurationError as error:  # On all ranks, when nothing more is sent.
            return {"failure": str(error)}
        return {index: state for index, state in states.items() if state}

    def merged(self, owns: Sequence[Own]) -> dict[str, Any]:
        """This rank's state from those of all ranks, whatever their number was.

        Raises:
            ConfigurationError: they are of other parameters, or elements are missing.
        """
        manifest, every = owns[0]["manifest"], list(map(_pieces_in, owns))
        self._check_strides(manifest)
        states = {n: self._cut([one[n] for one in every if n in one], n) for n in self.pieces({})}
        return {"manifest": manifest, "pieces": self.pieces(states)}

    def _cut(self, pieces: Iterable[Piece], index: int, *, is_whole: bool = False) -> dict[str, Any]:
        """The state of this rank's chunk of a parameter, or of the ``is_whole`` parameter, from those of any chunks.

        Raises:
            ConfigurationError: elements are missing.
        """
        shard, state, flat = self.shards[index], dict[str, Any](), dict[str, Tensor]()
        start, end = _elements_of(shard, is_whole=is_whole)
        # The state of a whole parameter is in the order that its memory had, to be loaded in the order that it has.
        strides, missing = shard.strides if is_whole else shard.parameter.stride(), dict[str, int]()
        for piece in pieces:
            begin = piece["start"]
            first, last = max(start, begin), min(end, begin + math.prod(piece["shape"]))
            for key, value in piece["state"].items():
                if not is_per_element(value, piece["shape"]):
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
        self._check_strides(own["manifest"])
        pieces = self._pieces_here(own)
        for index, here in self.pieces({}).items():
            shard, piece = self.shards[index], pieces.get(index, {"start": None, "shape": (), "state": {}})
            if (piece["start"], list(piece["shape"])) != (here["start"], here["shape"]):
                raise ConfigurationError(
                    f"this rank's share of {shard.name} of shape {tuple(shard.parameter.shape)} is not the one that "
                    "was saved: use the same partition, order of parameters, memory format and number of ranks, or the "
                    "states of all ranks"
                )
            if (master := piece["state"].get(_MASTER)) is not None and not shard.has_master:
                raise ConfigurationError(
                    f"the state has a copy of {shard.name} in {master.dtype}, from which it was stepped, and this "
                    f"optimizer keeps none: give ZeroRedundancyOptimizer master_dtype={master.dtype}, with parameters "
                    "of the dtype that they had"
                )
            check_divisible(self.optimizer, shard, piece["state"], here["shape"])

    @torch.no_grad()
    def load(self, own: Own) -> None:
        """Replace the state, masters and hyperparameters of this rank by ``own``, which has passed :meth:`check` and is
        kept, after the model's parameters."""
        manifest, pieces, dtypes = own["manifest"], self._pieces_here(own), list[torch.dtype | None]()
        rest = copy.deepcopy({**manifest["entries"], "state": manifest["state"]})
        loaded = {**self.optimizer.state_dict(), **rest}
        for shard in self.shards:
            shard.follow()
        owned = {id(shard.own): (index, shard) for index, shard in enumerate(self.shards) if shard.own is not None}
        for place, chunk in enumerate(self._chunks):
            index, shard = owned[id(chunk)]
            dtypes.append(manifest["dtypes"] and manifest["dtypes"][index])
            state = dict(pieces[index]["state"])
            master = state.pop(_MASTER, None)
            if shard.has_master:
                chunk.copy_(shard.shaped(shard.view) if master is None else master)
            if state:
                loaded["state"][place] = state
        for group, options in zip(loaded["param_groups"], manifest["options"], strict=True):
            group.update(options)
        load_as_saved(self.optimizer, loaded, dtypes=dtypes)
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
        then, here = ([len(group["params"]) for group in one] for one in (groups, self.param_groups))
        if then != here:
            raise ConfigurationError(f"the checkpoint has groups of {then} parameters, but this optimizer has {here}")
        keys = [key for group in groups for key in group["params"]]
        rest = {key: value for key, value in state_dict["state"].items() if key not in keys}
        manifest = self.manifest(state=rest, entries=entries_of(state_dict), groups=groups, dtypes=dtypes)
        pieces = {}
        for index, (shard, key) in enumerate(zip(self.shards, keys, strict=True)):
            state, shape = state_dict["state"].get(key, {}), shard.parameter.shape
            check_divisible(self.optimizer, shard, state, shape)
            pieces[index] = {"start": 0, "shape": shape, "state": state}
        own = self.merged([{"manifest": manifest, "pieces": pieces}])
        self.check(own)
        self.load(own)

    def manifest(
        self,
        *,
        state: Mapping[Any, Any],
        entries: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        dtypes: Sequence[torch.dtype | None] | None,
    ) -> dict[str, Any]:
        """That of pieces of parameters that lie in memory as they do here."""
        return {
            "state": state,
            "entries": entries,
            "options": [options_of(group) for group in groups],
            "dtypes": dtypes,
            "strides": [list(shard.parameter.stride()) for shard in self.shards],
        }

    def _check_strides(self, manifest: Mapping[str, Any]) -> None:
        for shard, strides in zip(self.shards, manifest["strides"], strict=True):
            # Shapes are compared with the model's.
            here = zip(shard.parameter.shape, strides, shard.parameter.stride(), strict=False)
            if any(length != 1 and there != own for length, there, own in here):
                raise ConfigurationError(
                    f"{shard.name}: its strides in the checkpoint are {strides}, here "
                    f"{shard.parameter.stride()}: bring the model into that memory format, or load a consolidated "
                    "state_dict() instead"
                )

    def _pieces_here(self, own: Own) -> Mapping[int, Piece]:
        """Those of this rank; of version 0.1.0 in the shapes of chunks."""
        pieces: Mapping[int, Piece] = own["pieces"] if "pieces" in own else self.merged([own])["pieces"]
        return pieces


def _pieces_in(own: Own) -> Mapping[int, Piece]:
    """The pieces in ``own``, where those of version 0.1.0 are flat, ``3/exp_avg/0:512`` and ``3/step``."""
    if "pieces" in own:
        pieces: Mapping[int, Piece] = own["pieces"]
        return pieces
    found: dict[int, dict[str, Any]] = {}
    for match in filter(None, map(_NAME.fullmatch, own)):
        piece = found.setdefault(int(match["index"]), {"start": 0, "shape": [0], "state": {}})
        piece["state"][match["key"]] = value = own[match[0]]
        if match["start"] is not None:
            piece |= {"start": int(match["start"]), "shape": list(value.shape)}
    return found


def _elements_of(shard: Shard, *, is_whole: bool = False) -> Range:
    """The elements of ``shard`` in this rank's state, or in that of the ``is_whole`` parameter."""
    return (0, shard.parameter.numel()) if is_whole or shard.is_whole else shard.range


def in_memory_order(value: Tensor, strides: Sequence[int]) -> Tensor:
    """A value per element of a parameter with these ``strides``, or of a flat part of it, flat in the order of the
    parameter's memory."""
    if value.dim() == len(strides) and value.stride() != tuple(strides):
        value = torch.empty_strided(value.size(), tuple(strides), dtype=value.dtype, device=value.device).copy_(value)
    return flatten(value)


def packed(whole: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A consolidated state with these groups as the plain optimizer's ``state_dict()``, which the caller may change."""
    places = itertools.count()
    groups = [{**group, "params": list(itertools.islice(places, len(group["params"])))} for group in param_groups]
    found: dict[str, Any] = mapped({**whole, "param_groups": groups}, lambda one: one, "zero.state_dict()")
    return found


def entries_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of an optimizer's ``state_dict()`` beside state and groups."""
    return {key: value for key, value in state_dict.items() if key not in ("state", "param_groups", _NO_STATE)}


def load_as_saved(
    optimizer: Any, saved: Mapping[str, Any], *, dtypes: Sequence[torch.dtype | None] | None = None
) -> None:
    """``optimizer.load_state_dict``, which takes strings for sequences and casts state to the parameter's dtype; then
    these values as they were saved. Moments stay in that dtype where the parameter had another one of ``dtypes``."""
    optimizer.load_state_dict(dict(saved))
    if not {"state", "param_groups"} <= set(saved):
        return  # A form of the optimizer's own.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    for place, (parameter, number) in enumerate(zip(parameters, keys, strict=True)):
        loaded, is_as_saved = optimizer.state.get(parameter, {}), dtypes is None or dtypes[place] == parameter.dtype
        for key, value in saved["state"].get(number, {}).items():
            now = loaded.get(key)
            if isinstance(value, (str, dict, list, tuple)) and not tensors_in(value):
                loaded[key] = value
            if key == "step" or not isinstance(value, Tensor) or not isinstance(now, Tensor):
                continue
            is_number = value.numel() == 1 and value.shape != parameter.shape
            is_kept = is_as_saved or is_number or not value.dtype.is_floating_point
            if is_kept and now.dtype == parameter.dtype != value.dtype:
                loaded[key] = value.to(now.device)
