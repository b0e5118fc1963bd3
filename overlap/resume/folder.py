"""A run in one folder, which any number of ranks writes and any other number reads.

[Note: the folder]

``torch.distributed.checkpoint`` writes it, under the names of PyTorch's own ``get_state_dict``, so that plain
optimizers and FSDP2 read it, and it may be theirs:

- ``model.<name>`` and ``optim.state.<name>.<key>``, which ranks have in common by declaration: values that DDP keeps
  the same, and the state of optimizers of parameters that it keeps the same. One rank writes each of them. Of a
  ``ZeroRedundancyOptimizer`` each rank writes boxes of the parameter's own shape, so the file depends on no cut.
- ``overlap.bytes.<rank>``, a rank's own state, flat. Its parts are the memory of stages, parameters and buffers that
  DDP does not keep the same, optimizers of ranks that train apart, and the objects and values of the loop; those of the
  latter that all ranks have alike are in ``overlap.bytes.all``.
- ``overlap.skeleton.<rank>``, its nested values, by part, with tensors on the device "meta".
- ``overlap.manifest``: how to read the rest.

A rank has one box at a time in memory beside its state. ``.metadata`` is written last.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from hashlib import sha256
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.nn.parallel import DistributedDataParallel

from overlap._checks import check_ddp, check_flag, short_repr
from overlap._torch.c10d import side_group
from overlap._torch.checkpoint import Boxes, Folder, write
from overlap.errors import CollectiveError, ConfigurationError
from overlap.hooks.stage import redistributed
from overlap.hooks.states import StatesOfRanks, uncopied
from overlap.join.context import refuse_once_joined
from overlap.optim import ZeroRedundancyOptimizer
from overlap.optim.zero.checkpoint import check_no_masters, entries_of, in_memory_order, numbered
from overlap.optim.zero.shards import Shard, options_of
from overlap.optim.zero.state import is_per_element, tensors_in
from overlap.ranks.board import Agreement, failures_explained
from overlap.ranks.values import Leaf, filled, laid_out, mapped, snapshot, split
from overlap.resume.state import VERSION, Optim, RankState, class_of
from overlap.resume.train_state import state_in

_MANIFEST = "overlap.manifest"
# What schedulers add to groups, and the names of parameters.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "param_names"}
_SKELETON = "overlap.skeleton."
_BYTES = "overlap.bytes."
_ALL = "all"
_MODEL = "model."
_STATE = "optim.state."
_GROUPS = "optim.param_groups."
_LOOP = "loop."
_writing = futures.ThreadPoolExecutor(1, thread_name_prefix="overlap-save")
_pending: WeakKeyDictionary[dist.ProcessGroup, Future[None]] = WeakKeyDictionary()


def save(
    folder: str | PathLike[str],
    ddp: DistributedDataParallel,
    optim: Optim = None,
    *,
    wait: bool = True,
    **loop: Any,
) -> Future[None] | None:
    """Save all that the ranks of a run need to resume into one folder; call it on every rank, after ``step()``.

    It has the contents of :func:`state_dict`, and ``loop``. Any number of ranks can :func:`load` it, and PyTorch's own
    calls read the model and the optimizers. A save that was interrupted is refused by :func:`load`.

    Args:
        folder: of this save alone, on a file system that all ranks share.
        ddp: the model.
        optim: the optimizer of the training loop, or a list of all where it has several; ``None`` saves none.
        wait: return when all is written. If ``False``, copy everything to CPU memory and write it in a thread.
        **loop: objects of the training loop with a ``state_dict`` and a ``load_state_dict``, such as schedulers, a
            ``GradScaler`` or a ``StatefulDataLoader``; numbers, texts and tensors. Each rank saves its own.

    Returns:
        With ``wait=False`` a future of the write. The next save waits for it.

    Communication: one agreement; the plan of each rank is gathered on rank 0, over a Gloo group.

    Raises:
        ConfigurationError: ``folder`` has a checkpoint already, or as for :func:`state_dict`. Nothing was written.
        TrainingLoopError: between backward and ``step()``.
        PeerError: another rank has raised one of these.
        CollectiveError: a rank could not write its part, or is lost.

    >>> optim = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    >>> from tempfile import mkdtemp
    >>> overlap.save(mkdtemp(), ddp, optim, step=1)
    """
    path, group = Path(folder), check_ddp(ddp).process_group
    with Agreement(group, "save a run") as agreement:
        refuse_once_joined(group, "overlap.save()")
        check_flag("wait", wait)
        if (before := _pending.pop(group, None)) is not None:
            futures.wait([before])
        if (path / ".metadata").exists():
            raise ConfigurationError(
                f"{path} has a checkpoint already, and one that is written over it and interrupted would mix both: "
                "give each save a folder of its own, such as f'runs/1/{step:06}'"
            )
        saved = _Saved(RankState(ddp, optim, "save"), loop, is_copied=not wait)
        items = saved.entries(agreement.agree(saved.digests, _are_same))
    if wait:
        _write(items, path, side_group(group))
        return None
    _pending[group] = future = _writing.submit(_write, items, path, side_group(group))
    return future


def load(folder: str | PathLike[str], ddp: DistributedDataParallel, optim: Optim = None, **loop: Any) -> dict[str, Any]:
    """Load a folder of :func:`save`, on any number of ranks; call it on every rank, after stages are registered.

    Everything is read and compared before anything is changed; docs/resuming.md says how each part comes to another
    number of ranks. It also loads a :class:`TrainState` that ``torch.distributed.checkpoint`` has saved, and a folder
    with ``model`` and ``optim`` of PyTorch's ``get_state_dict``, into stages without memory.

    Args:
        folder: that was saved.
        ddp: the model, with the stages of the run that was saved.
        optim: its optimizer, or the list of them in the order in which they were saved. A plain one's state loads into
            a ``ZeroRedundancyOptimizer``, and the other way round.
        **loop: the objects that were saved under these names, to be loaded.

    Returns:
        The values that were saved by name, without the objects; at another number of ranks those that all ranks had
        alike.

    Communication: one agreement. Each rank reads by itself, in CPU memory.

    Raises:
        ConfigurationError: ``folder`` has no whole checkpoint, is damaged, or is another model's, optimizer's or
            chain's; or an object differed between ranks, and their number is another. Nothing was changed.
        TrainingLoopError: between backward and ``step()``, where the update was made in backward.
        PeerError: another rank has raised one of these.

    >>> optim = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optim, 10)
    >>> from tempfile import mkdtemp
    >>> overlap.save(folder := mkdtemp(), ddp, optim, scheduler=scheduler, epoch=3)
    >>> overlap.load(folder, ddp, optim, scheduler=scheduler)
    {'epoch': 3}
    """
    group = check_ddp(ddp).process_group
    with Agreement(group, "load a run") as agreement, contextlib.ExitStack() as undone, uncopied():
        refuse_once_joined(group, "overlap.load()")
        run = RankState(ddp, optim, "load")
        saved = _Found(Path(folder), run)
        state = saved.state()
        run.check(state)
        values = saved.loop(loop)
        for target, its in saved.risky(state, loop):
            # Objects that may refuse a state are loaded before ranks agree, and get their own back where one does.
            undone.callback(target.load_state_dict, copy.deepcopy(target.state_dict()))
            target.load_state_dict(its)
        agreement.agree()
        undone.pop_all()
    run.load_checked(state)
    return values


def _write(items: dict[str, Any], path: Path, group: dist.ProcessGroup) -> None:
    try:
        with failures_explained():
            write(items, str(path), group)
    except CheckpointException as error:
        first = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items())[:3])
        raise CollectiveError(f"{path} was not written, and is no checkpoint: {first}") from error


class _Bytes:
    """Tensors one after another as a tensor of bytes, which is made where it is sliced."""

    dtype = torch.uint8

    def __init__(self, leaves: Sequence[Leaf], tensors: Sequence[Tensor]) -> None:
        self._numel = leaves[-1].end if leaves else 0
        self._placed = [(leaf.start, one) for leaf, one in zip(leaves, tensors, strict=True) if one.numel()]

    def numel(self) -> int:
        return self._numel

    def __getitem__(self, elements: slice) -> Tensor:
        start, end = elements.start, elements.stop
        made = torch.zeros(end - start, dtype=torch.uint8, device="cpu")
        for begin, tensor in self._placed:
            first, last = max(start, begin), min(end, begin + tensor.nbytes)
            if first < last:
                made[first - start : last - start] = _bytes_of(tensor)[first - begin : last - begin]
        return made


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _are_same(of_ranks: list[dict[str, str | None]]) -> dict[str, bool]:
    """Of each part, by the digests of all ranks, whether they have it the same; of one without a digest they have
    not."""
    digests = {part: {one.get(part) for one in of_ranks} for part in sorted({part for one in of_ranks for part in one})}
    return {part: len(found) == 1 and None not in found for part, found in digests.items()}


class _Saved:
    """The entries of a folder that this rank of ``run`` writes."""

    def __init__(self, run: RankState, loop: Mapping[str, Any], *, is_copied: bool) -> None:
        self._run = run
        self._objects = [name for name, value in loop.items() if hasattr(value, "state_dict")]
        added = {name: value.state_dict() if name in self._objects else value for name, value in loop.items()}
        state = run.state()
        if is_copied:
            added, state = {name: snapshot(value, f"{name}=...") for name, value in added.items()}, snapshot(state)
        own = {f"{_LOOP}{name}": value for name, value in added.items()}
        common = {name: value for name, value in state["model"].items() if run.has_common(name)}
        own["model"] = {name: value for name, value in state["model"].items() if name not in common}
        own["apart"] = common if run.trains_apart else {}
        own["stages"] = (state["stages"] or {"state": {}})["state"]
        self._items: dict[str, Any] = {}
        for name, value in state["model"].items():
            # Buffers are rank 0's, as those that DDP broadcasts.
            self._put(f"{_MODEL}{name}", value, is_shared=name in common and name in run.parameters)
        self._records: list[dict[str, Any]] = []
        self._groups = 0
        for place, its in enumerate(state["optimizer"]):
            record = {"class": its["class"], "parameters": its["parameters"], "is_own": run.is_own(place)}
            if record["is_own"]:
                own[f"optimizer.{place}"] = its
            else:
                record |= self._put_optimizer(place, its)
            self._records.append(record)
        self._own = {part: value for part, value in own.items() if part.startswith(_LOOP) or value}
        self.digests: dict[str, str | None] = {}
        """Of the parts of this rank's own state; ``None`` for one that ranks need not compare."""
        for part, value in self._own.items():
            skeleton, tensors = split(value, _where(part))  # Raises, before any rank writes.
            content = sha256(repr(skeleton).encode())
            is_compared = part == "apart" or part.startswith(_LOOP)
            for one in tensors if is_compared else ():
                content.update(_bytes_of(one.cpu()).numpy().data)
            self.digests[part] = content.hexdigest() if is_compared else None

    def entries(self, are_same: dict[str, bool]) -> dict[str, Any]:
        """They, by name, where ranks have the parts that ``are_same``; one rank writes an entry that several have."""
        items, run = self._items, self._run
        if are_same.get("apart"):
            del are_same["apart"]  # Ranks have one model, as those that do not train apart.
        elif "apart" in are_same:
            items = {name: value for name, value in items.items() if not name.startswith(_MODEL)}
        for who, is_same in ((_ALL, True), (run.rank, False)):
            if not (own := {part: value for part, value in self._own.items() if are_same.get(part) is is_same}):
                continue
            skeleton, tensors = split(own)
            flat = _Bytes(laid_out(skeleton)[1], tensors)
            boxes = Boxes.chunk(flat, (flat.numel(),), (1,), 0)
            items[f"{_BYTES}{who}"] = boxes.share(_BYTES, run.rank, run.ranks) if is_same else boxes
            if run.rank == 0 or not is_same:
                items[f"{_SKELETON}{who}"] = skeleton
        if run.rank == 0:
            items[_MANIFEST] = {
                "version": VERSION,
                "ranks": run.ranks,
                "classes": run.classes,
                "signature": None if run.stage is None else run.stage.signature,
                "parts": are_same,
                "objects": self._objects,
                "optimizers": self._records,
            }
        return items

    def _put(self, name: str, value: Any, *, is_shared: bool) -> None:
        """Write ``value``, to which ranks write parts where it ``is_shared``, and which else rank 0 writes."""
        if is_shared and isinstance(value, Tensor):
            self._items[name] = Boxes.whole(value).share(name, self._run.rank, self._run.ranks)
        elif self._run.rank == 0:
            self._items[name] = _written(name, value)

    def _put_optimizer(self, place: int, its: Mapping[str, Any]) -> dict[str, Any]:
        """By the names of its parameters; returns the entries that belong to none."""
        optim, names = self._run.optimizers[place], _names_of(its["parameters"], place)
        shards = optim.sharded_state().shards if isinstance(optim, ZeroRedundancyOptimizer) else None
        if "state" not in its["state"]:
            raise ConfigurationError(
                f"the state_dict of {its['class']} has a form of its own, which no folder has: save the run by "
                "overlap.state_dict(ddp, optim), in a file a rank"
            )
        rest = dict(its["state"]["state"])
        for index, name in enumerate(names):
            for key, value in rest.pop(index, {}).items():
                entry = f"{_STATE}{name}.{key}"
                if shards is None:
                    self._put(entry, value, is_shared=True)
                    continue
                shard, (start, shape) = shards[index], its["places"][index]
                if is_per_element(value, shape):
                    flat = in_memory_order(value, shard.strides)
                    self._items[entry] = Boxes.chunk(flat, shard.parameter.shape, shard.strides, start)
                elif shard.is_whole or shard.rank == 0:  # Other values are the same on all ranks.
                    self._items[entry] = _written(entry, value)
        for group, labels in zip(its["state"]["param_groups"], its["parameters"], strict=True):
            for key, value in {**options_of(group), "params": labels}.items():
                self._put(f"{_GROUPS}{self._groups}.{key}", value, is_shared=False)
            self._groups += 1
        made: dict[str, Any] = snapshot({"state": rest, "entries": entries_of(its["state"])}, its["class"])
        return made


def _written(name: str, value: Any) -> Any:
    """A value of a state as one rank writes all of it."""
    return Boxes.whole(value) if isinstance(value, Tensor) else snapshot(value, name)


class _Lazily(Mapping[Any, Any]):
    """A state in a folder, laid out; a value is read when it is looked up, and one of nested values when they are."""

    def __init__(self, laid: Mapping[Any, Any], read: Callable[[Any], Any]) -> None:
        self._laid, self._read = laid, read

    def __getitem__(self, key: Any) -> Any:
        value = self._laid[key]
        is_nested = isinstance(value, Mapping) and any(isinstance(one, Mapping) for one in value.values())
        return _Lazily(value, self._read) if is_nested else self._read(value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._laid)

    def __len__(self) -> int:
        return len(self._laid)


class _Found:
    """The contents of ``folder`` for this rank of ``run``."""

    def __init__(self, folder: Path, run: RankState) -> None:
        self._path, self._run = folder, run
        self._folder = self._checked(Folder, str(folder))
        self._manifest: dict[str, Any] = {"ranks": run.ranks, "parts": {}, "objects": (), "optimizers": None}
        if _MANIFEST in self._folder.found:
            self._manifest = self._read(_MANIFEST)
            if self._manifest["version"] != VERSION:
                raise ConfigurationError(f"{folder} was saved by another version of overlap, in another form")
        self._parts: Mapping[str, bool] = self._manifest["parts"]
        self._ranks: int = self._manifest["ranks"]
        self._is_other = self._ranks != run.ranks
        self._laid: dict[str, Any] = {}

    def _checked(self, read: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return read(*arguments)
        except Exception as error:
            fault = f"is damaged, load the one before: {type(error).__name__}: {error}"
            if not (self._path / ".metadata").exists():
                fault = (
                    "has no whole checkpoint: .metadata is missing, which is written last, so there is none, or its "
                    "save was interrupted: load the one before"
                )
            raise ConfigurationError(f"{self._path} {fault}") from error

    def _read(self, name: str, boxes: Boxes | None = None) -> Any:
        """An entry, or into ``boxes`` a part of it."""
        return self._checked(self._folder.read, name, boxes)

    def state(self) -> dict[str, Any]:
        """As :func:`overlap.state_dict` on this rank."""
        run = self._run
        pickled = [] if self._parts else [name for name in self._folder.found if self._folder.is_pickled(name)]
        if (state := state_in(pickled, self._read, run)) is not None:
            return state
        if "apart" in self._parts and self._is_other:
            raise ConfigurationError(
                f"{self._path} was saved while ranks had different models, by {self._ranks} ranks, and here are "
                f"{run.ranks}: save where ranks have just averaged, or resume with as many ranks as before"
            )
        optimizers, old = self._optimizers(), run.rank % self._ranks
        model = {name: value for part in ("model", "apart") for name, value in self._part(part, old).items()}
        for name in self._folder.found:
            if name.startswith(_MODEL) and (plain := name.removeprefix(_MODEL)) not in model:
                model[plain] = self._read(name)
        place = {"version": VERSION, "rank": run.rank, "ranks": run.ranks}
        return {**place, "model": model, "optimizer": optimizers, "stages": self._stages()}

    def loop(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the loop. Raises: ConfigurationError: something ``given`` was not saved, or is of a rank."""
        saved = {part.removeprefix(_LOOP): is_same for part, is_same in self._parts.items() if part.startswith(_LOOP)}
        objects = self._manifest["objects"]
        for name, target in given.items():
            if not hasattr(target, "load_state_dict"):
                raise ConfigurationError(
                    f"{name}={short_repr(target)} has no load_state_dict(): give objects; values are returned"
                )
            if name not in objects:
                raise ConfigurationError(f"no object {name} was saved in {self._path}, which has {sorted(objects)}")
            if self._is_other and not saved[name]:
                raise ConfigurationError(
                    f"{name} was saved by {self._ranks} ranks, each its own, and here are {self._run.ranks}: leave "
                    f"{name} out of load(), and set its position by hand"
                )
        return {
            name: snapshot(self._part(f"{_LOOP}{name}", self._run.rank))
            for name, is_same in saved.items()
            if name not in objects and (is_same or not self._is_other)
        }

    def risky(self, state: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
        """The objects that may still refuse a state, each with its state, which it may keep."""
        run = self._run
        if run.stage is not None and self._manifest.get("signature") != run.stage.signature:
            yield run.stage, state["stages"]["state"]
        for name, target in given.items():
            yield target, snapshot(self._part(f"{_LOOP}{name}", run.rank))

    # Parts of a rank's own.

    def _who(self, part: str, rank: int) -> int | str:
        return _ALL if self._parts.get(part) else rank

    def _laid_out(self, part: str, rank: int) -> Any:
        """A rank's part, to be read."""
        name = f"{_SKELETON}{self._who(part, rank)}"
        if name not in self._laid:
            self._laid[name] = laid_out(self._read(name))[0] if name in self._folder.found else {}
        return self._laid[name].get(part, {})

    def _values(self, part: str, rank: int, laid: Any) -> Any:
        """Those of some of a rank's part; tensors are views of one, so who keeps them copies them."""
        leaves: list[Leaf] = []
        mapped(laid, lambda one: leaves.append(one) if isinstance(one, Leaf) else None)
        start, end = (leaves[0].start, leaves[-1].end) if leaves else (0, 0)
        buffer, name = torch.empty(end - start, dtype=torch.uint8, device="cpu"), f"{_BYTES}{self._who(part, rank)}"
        if end > start:
            shape = self._folder.found[name].size
            self._read(name, Boxes.chunk(buffer, shape, (1,), start, is_read=True))
        return filled(
            laid, lambda leaf: buffer[leaf.start - start : leaf.end - start].view(leaf.dtype).view(leaf.shape)
        )

    def _part(self, part: str, rank: int) -> Any:
        return self._values(part, rank, self._laid_out(part, rank))

    def _of_ranks(self, part: str) -> StatesOfRanks:
        return StatesOfRanks(
            self._ranks, lambda rank: _Lazily(self._laid_out(part, rank), partial(self._values, part, rank))
        )

    # Parts of the state.

    def _stages(self) -> dict[str, Any] | None:
        run = self._run
        has_memory = "stages" in self._parts
        if run.stage is None:
            return None if not has_memory else {"classes": self._manifest["classes"], "state": {}}
        if not has_memory and self._manifest.get("classes", ...) != run.classes:
            # Of other stages, or none; these begin anew, if they have not begun.
            with uncopied():
                if tensors_in(run.stage.state_dict()):
                    raise ConfigurationError(
                        f"{self._path} has no memory of stages, and {run.stage!r} has some of its own passes: load "
                        "before the first forward, and its stages begin anew"
                    )
            return {"classes": run.classes, "state": {}}
        if self._is_other:
            state = redistributed(run.stage, self._of_ranks("stages"), rank=run.rank, ranks=run.ranks)
        else:
            state = self._part("stages", run.rank)
        return {"classes": self._manifest["classes"], "state": state}

    def _optimizers(self) -> list[dict[str, Any]]:
        run, found = self._run, self._folder.found
        groups: list[dict[str, Any]] = []
        for name in found:
            if name.startswith(_GROUPS):
                _, _, number, key = name.split(".", 3)
                if not number.isdigit():
                    raise self._of_no_known_form()
                groups += [{} for _ in range(int(number) + 1 - len(groups))]
                groups[int(number)][key] = self._read(name)
        records = self._manifest["optimizers"]
        if records is None:  # PyTorch's own, with the groups of all optimizers in their order.
            self._check_groups(groups)
            labels = iter([group["params"] for group in groups])
            records = [
                {"class": class_of(one), "parameters": list(islice(labels, len(one.param_groups))), "is_own": False}
                for one in (run.optimizers if groups else ())
            ]
            for one in records[-1:]:
                one["parameters"] += labels  # Which are then refused.
        keys_of = _keys_of(found, {name for n, one in enumerate(records) for name in _names_of(one["parameters"], n)})
        rest, states = iter(groups), []
        for place, record in enumerate(records):
            state = {key: record[key] for key in ("class", "parameters")}
            if place < len(run.optimizers):
                if _inner_class(record["class"]) == _inner_class(here := class_of(run.optimizers[place])):
                    state["class"] = here
                if not record["is_own"]:
                    state |= self._optimizer(place, record, list(islice(rest, len(record["parameters"]))), keys_of)
                    if record["class"] != here and not isinstance(run.optimizers[place], ZeroRedundancyOptimizer):
                        check_no_masters(run.optimizers[place], state["state"])
                elif self._is_other and state["class"] == here:
                    state = snapshot(run.redistributed(place, self._of_ranks(f"optimizer.{place}")))
                elif not self._is_other:
                    state = snapshot(self._part(f"optimizer.{place}", run.rank))
            states.append(state)
        return states

    def _of_no_known_form(self) -> ConfigurationError:
        return ConfigurationError(
            f"the optimizer's state in {self._path} has another form than that of overlap.save and of PyTorch's "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optim): save it by one of these"
        )

    def _check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raises: ConfigurationError: groups that PyTorch has saved are of another optimizer."""
        for group in groups:
            labels = group.get("params")
            if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
                raise self._of_no_known_form()
        here = [(one, group) for one in self._run.optimizers for group in one.param_groups]
        for (optim, own), group in zip(here, groups, strict=False):
            missing, others = {*getattr(optim, "defaults", ())} - {*group}, {*group} - {*own} - _OF_SCHEDULERS
            if missing and others:
                raise ConfigurationError(
                    f"{self._path} has the state of an optimizer with the options {sorted(others)}, and "
                    f"{class_of(optim)} has {sorted(missing)}: give the optimizer that was saved"
                )

    def _optimizer(
        self, place: int, record: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], keys_of: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The state of one whose parameters ranks have in common."""
        optim, names = self._run.optimizers[place], _names_of(record["parameters"], place)
        own = optim.sharded_state() if isinstance(optim, ZeroRedundancyOptimizer) else None
        states, cut = dict(record.get("state", {})), {} if own is None else own.cut()
        for index, name in enumerate(names):
            for key in keys_of.get(name, ()) if own is None or index in cut["places"] else ():
                entry = f"{_STATE}{name}.{key}"
                chunk = () if own is None else (own.shards[index], *cut["places"][index])
                states.setdefault(index, {})[key] = self._chunk(entry, *chunk) if chunk else self._read(entry)
        whole = {**record.get("entries", {}), "state": states, "param_groups": numbered(groups)}
        return {**cut, "state": whole}

    def _chunk(self, name: str, shard: Shard, start: int, shape: Sequence[int]) -> Any:
        """That of an entry which has one value per element; all of another."""
        found, whole = self._folder.found[name], shard.parameter
        if self._folder.is_pickled(name) or found.size != whole.shape:
            return self._read(name)
        flat = torch.empty(math.prod(shape), dtype=found.properties.dtype, device="cpu")
        boxes = Boxes.chunk(flat, whole.shape, whole.stride(), start, is_read=True)
        self._read(name, boxes)
        return shard.shaped(flat)


def _names_of(labels: Sequence[Sequence[str]], place: int) -> list[str]:
    """The names of an optimizer's parameters in a folder; of those outside of the model by their numbers."""
    flat = enumerate(label for group in labels for label in group)
    return [f"outside.{place}.{number}" if label.startswith("outside") else label for number, label in flat]


def _keys_of(found: Iterable[str], names: Collection[str]) -> dict[str, list[str]]:
    """The keys of the state of each of these parameters that a folder has."""
    keys: dict[str, list[str]] = {}
    for entry in found:
        parts = entry.removeprefix(_STATE).split(".") if entry.startswith(_STATE) else []
        for length in range(1, len(parts)):
            if (name := ".".join(parts[:length])) in names:
                keys.setdefault(name, []).append(".".join(parts[length:]))
                break
    return keys


def _inner_class(text: str) -> str:
    """The class of the optimizer that does the arithmetic, whether or not it is divided."""
    return text.removeprefix("ZeroRedundancyOptimizer(").removesuffix(")")


def _where(part: str) -> str:
    """A part in a message."""
    return f"{part.removeprefix(_LOOP)}=..." if part.startswith(_LOOP) else f"state_dict()[{part!r}]"
