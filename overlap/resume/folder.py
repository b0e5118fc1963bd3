"""A run in one folder, which any number of ranks writes and any other number reads.

[Note: the folder]

``torch.distributed.checkpoint`` writes it, under the names of PyTorch's own ``get_state_dict``, so that plain
optimizers and FSDP2 read it, and it may be theirs:

- ``model.<name>`` and ``optim.state.<name>.<key>``, which ranks have in common by declaration: what DDP keeps the same,
  and the state of optimizers of parameters that it keeps the same. What several ranks have is written once. Of a
  ``ZeroRedundancyOptimizer`` each rank writes boxes of the parameter's own shape, so the file depends on no cut.
- ``overlap.own.<dtype>``, with a row for each rank: what is a rank's own, flat, part after part. The parts are the
  memory of stages, parameters and buffers that DDP does not keep the same, optimizers of ranks that train apart, and
  what the loop adds. ``overlap.same.<dtype>`` has one row, of what the loop adds that all ranks have alike.
- ``overlap.manifest``: what the rest means. Where values lie in rows follows from the *skeleton* of a part, its nested
  values with tensors on the device "meta" in the place of those that are in rows.

A rank has one box at a time in memory beside its state. ``.metadata`` is written last.
"""

from __future__ import annotations

import contextlib
import copy
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from hashlib import sha256
from itertools import accumulate, pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap._checks import check_ddp, check_flag, digest, told
from overlap._torch.c10d import side_group
from overlap.errors import CollectiveError, ConfigurationError
from overlap.hooks.stage import redistributed
from overlap.hooks.states import StatesOfRanks, uncopied
from overlap.join.context import refuse_once_joined
from overlap.optim import LocalSGD, ZeroRedundancyOptimizer
from overlap.optim.zero.checkpoint import MANIFEST, entries_of, needed, place_of
from overlap.optim.zero.shards import options_of
from overlap.ranks.board import Agreement, failures_explained
from overlap.ranks.values import joined, packed, sizes_of, snapshot, split, unpacked
from overlap.resume.state import VERSION, Optim, Run
from overlap.resume.train_state import states_in

if TYPE_CHECKING:
    from overlap._torch.checkpoint import Boxes, Folder

_MANIFEST = "overlap.manifest"
_SKELETON = "overlap.skeleton."
_ROWS = {False: "overlap.own", True: "overlap.same"}
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

    It has what :func:`state_dict` has, and in addition ``loop``, values and objects by name::

        overlap.save(f"runs/1/{step:06}", ddp, optim, step=step, scheduler=scheduler, loader=loader)

    Any number of ranks can :func:`load` it, and PyTorch's own calls read the model and the optimizers. A save that was
    interrupted is not a checkpoint, and is refused by :func:`load`.

    Args:
        folder: of this save alone, on a file system that all ranks share.
        ddp: the model.
        optim: the optimizer of the training loop, or a list of all where it has several; where ``None`` no optimizer is
            saved.
        wait: return when all is written. If ``False``, copy everything to CPU memory and write it in a thread.
        **loop: what the loop adds: objects with a ``state_dict`` and a ``load_state_dict``, such as schedulers, a
            ``GradScaler`` or a ``StatefulDataLoader``; numbers, texts and tensors. Each rank saves its own.

    Returns:
        With ``wait=False`` a future, whose ``result()`` returns when all is written, or raises why it is not. The next
        save waits for it.

    Communication: one agreement; plans of what each rank writes are gathered on rank 0, over a Gloo group.

    Raises:
        ConfigurationError: ``folder`` has a checkpoint already, or something cannot be saved, as for
            :func:`state_dict`. Nothing was written.
        TrainingLoopError: between backward and ``step()``.
        PeerError: another rank has raised one of these.
        CollectiveError: a rank could not write its part, or is lost.

    >>> optim = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))
    >>> chain(PowerSGD(rank=1), Step(optim)).register(ddp)
    <chain(PowerSGD(rank=1), Step(SGD, interleaved)) registered>
    >>> from tempfile import mkdtemp
    >>> folder = mkdtemp()
    >>> overlap.save(folder, ddp, optim, step=1)
    >>> overlap.load(folder, ddp, optim)
    {'step': 1}
    """
    from overlap._torch.checkpoint import write  # Its imports take long.

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
        saved = _Saved(Run(ddp, optim, "save"), loop, is_copied=not wait)
        saved.decided = agreement.agree(saved.told(), _decide)
        items = saved.items()
    writing = partial(_write, write, items, path, side_group(group))
    if wait:
        return writing()
    _pending[group] = future = _writing.submit(writing)
    return future


def load(folder: str | PathLike[str], ddp: DistributedDataParallel, optim: Optim = None, **loop: Any) -> dict[str, Any]:
    """Load what :func:`save` has written, on any number of ranks; call it on every rank, after stages are registered.

    Everything is read and compared before anything is changed. How each part comes to another number of ranks is
    described in ``docs/resuming.md``. It also loads a :class:`TrainState` that ``torch.distributed.checkpoint`` has
    saved, and a folder with ``model`` and ``optim`` of PyTorch's ``get_state_dict``, into stages without memory.

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
            chain's; or an object was saved that differed between the ranks, and their number is another. Nothing was
            changed.
        TrainingLoopError: between backward and ``step()``, where the update was made in backward.
        PeerError: another rank has raised one of these.

    >>> optim = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))
    >>> chain(PowerSGD(rank=1), Step(optim)).register(ddp)
    <chain(PowerSGD(rank=1), Step(SGD, interleaved)) registered>
    >>> from tempfile import mkdtemp
    >>> folder = mkdtemp()
    >>> scheduler = torch.optim.lr_scheduler.StepLR(optim, 10)
    >>> overlap.save(folder, ddp, optim, scheduler=scheduler, epoch=3)
    >>> overlap.load(folder, ddp, optim, scheduler=scheduler)
    {'epoch': 3}
    """
    group = check_ddp(ddp).process_group
    with Agreement(group, "load a run") as agreement, contextlib.ExitStack() as undone:
        refuse_once_joined(group, "overlap.load()")
        run = Run(ddp, optim, "load")
        saved = _Found(Path(folder), run)
        state = saved.state()
        run.check(state)
        saved.fill()
        values = saved.loop(loop)
        for target, its in saved.risky(state, loop):
            # What may refuse its state is loaded before ranks agree, and gets its own back where one does.
            undone.callback(target.load_state_dict, copy.deepcopy(target.state_dict()))
            target.load_state_dict(its)
        agreement.agree()
        undone.pop_all()
    run.load_checked(state)
    return values


def _write(write: Callable[..., None], items: dict[str, Any], path: Path, group: dist.ProcessGroup) -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with failures_explained():
            write(items, str(path), group)
    except CheckpointException as error:
        first = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in sorted(error.failures.items())[:3])
        raise CollectiveError(f"{path} was not written, and is no checkpoint: {first}") from error


class _Part:
    """One part of what is a rank's own."""

    def __init__(self, value: Any, where: str, *, is_compared: bool) -> None:
        self.skeleton, self.leaves = split(value, where)
        self.packed = packed(self.skeleton)
        self.content = None
        if is_compared:
            found = sha256(repr(self.skeleton).encode())
            for leaf in self.leaves:
                found.update(_bytes_of(leaf))
            self.content = found.hexdigest()

    def told(self) -> dict[str, Any]:
        """To rank 0."""
        sizes: Counter[str] = Counter()
        for leaf in self.leaves:
            sizes[_name_of(leaf.dtype)] += leaf.numel()
        return {
            "skeleton": digest(self.skeleton),
            "content": self.content,
            "sizes": sizes,
            "packed": self.packed.numel(),
        }


def _decide(of_ranks: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """What all ranks do with each part, as rank 0 finds by what they have told."""
    decided: dict[str, Any] = {}
    for part in sorted({part for one in of_ranks for part in one}):
        every = [one.get(part, {"skeleton": "", "content": None, "sizes": {}, "packed": 8}) for one in of_ranks]
        sizes: Counter[str] = Counter()
        for one in every:
            sizes |= Counter(one["sizes"])
        is_same = len({one["content"] for one in every}) == 1 and every[0]["content"] is not None
        if part == "apart" and is_same:
            continue  # Ranks have one model, as those that do not train apart.
        decided[part] = {
            "is_alike": len({one["skeleton"] for one in every}) == 1,
            "is_same": is_same,
            "sizes": sizes,
            "packed": max(one["packed"] for one in every),
        }
    return decided


def _spans(decided: Mapping[str, Any], *, is_same: bool) -> dict[str, dict[str, range]]:
    """Where each part is in the rows of each dtype, of those that all ranks have alike or of the others."""
    ends: Counter[str] = Counter()
    spans: dict[str, dict[str, range]] = {}
    for part, found in decided.items():
        if found["is_same"] is is_same:
            spans[part] = {dtype: range(ends[dtype], ends[dtype] + size) for dtype, size in found["sizes"].items()}
            ends.update(found["sizes"])
    return spans


def _where(part: str) -> str:
    """A part in a message."""
    return f"{part.removeprefix(_LOOP)}=..." if part.startswith(_LOOP) else f"state_dict()[{part!r}]"


class _Saved:
    """What this rank saves of ``run``.

    Attributes:
        decided: what all ranks do with each part; see :func:`_decide`.
    """

    decided: Mapping[str, Any]

    def __init__(self, run: Run, loop: Mapping[str, Any], *, is_copied: bool) -> None:
        from overlap._torch.checkpoint import Boxes

        self._run = run
        self._objects = [name for name, value in loop.items() if hasattr(value, "state_dict")]
        added = {name: value.state_dict() if name in self._objects else value for name, value in loop.items()}
        added = {name: snapshot(value, f"{name}=...") if is_copied else value for name, value in added.items()}
        state = snapshot(run.state()) if is_copied else run.state()
        common = [name for name in state["model"] if run.has_common(name)]
        own = {f"{_LOOP}{name}": value for name, value in added.items()}
        own["model"] = {name: value for name, value in state["model"].items() if name not in common}
        own["apart"] = {name: state["model"][name] for name in common if run.trains_apart}
        own["stages"] = (state["stages"] or {"state": {}})["state"]
        self._items: dict[str, Any] = {}
        for name, value in state["model"].items():
            # Buffers are rank 0's, as those that DDP broadcasts.
            if name in common and name in run.parameters:
                self._items[f"{_MODEL}{name}"] = Boxes.whole(value).share(name, run.rank, run.ranks)
            elif run.rank == 0:
                self._put(f"{_MODEL}{name}", value)
        self._records: list[dict[str, Any]] = []
        self._groups = 0
        for place, its in enumerate(state["optimizer"]):
            is_own = run.is_own(place)
            rest = {} if is_own else self._put_optimizer(place, its)
            self._records.append({"class": its["class"], "parameters": its["parameters"], "is_own": is_own, **rest})
            if is_own:
                own[f"optimizer.{place}"] = its
        self._parts = {
            name: _Part(value, _where(name), is_compared=name == "apart" or name.startswith(_LOOP))
            for name, value in own.items()
            if name.startswith(_LOOP) or value
        }

    def told(self) -> dict[str, Any]:
        """Of each part, to rank 0."""
        return {name: part.told() for name, part in self._parts.items()}

    def items(self) -> dict[str, Any]:
        """What this rank writes, by name in the folder; of what several ranks have, one of them."""
        items, run = self._items, self._run
        if "apart" in self.decided:
            items = {name: value for name, value in items.items() if not name.startswith(_MODEL)}
        self._put_rows(items)
        if run.rank == 0:
            items[_MANIFEST] = {
                "version": VERSION,
                "ranks": run.ranks,
                "classes": run.classes,
                "signature": None if run.stage is None else run.stage.signature,
                "parts": self.decided,
                "skeletons": {
                    name: self._parts[name].skeleton for name, one in self.decided.items() if one["is_alike"]
                },
                "objects": self._objects,
                "optimizers": snapshot(self._records),
            }
        return items

    def _put(self, name: str, value: Any) -> None:
        from overlap._torch.checkpoint import Boxes

        self._items[name] = Boxes.whole(value) if isinstance(value, Tensor) else snapshot(value, name)

    def _put_optimizer(self, place: int, its: Mapping[str, Any]) -> dict[str, Any]:
        """By the names of its parameters; returns what belongs to none."""
        from overlap._torch.checkpoint import Boxes

        optim, names = self._run.optimizers[place], _names_of(its["parameters"], place)
        if isinstance(optim, ZeroRedundancyOptimizer):
            rest, shards = its["own"][MANIFEST], optim.sharded_state().shards
            for piece, value in its["own"].items():
                if piece == MANIFEST:
                    continue
                index, key, held = place_of(piece)
                name, shard = f"{_STATE}{names[index]}.{key}", shards[index]
                if held is None:
                    if shard.is_whole or shard.rank == 0:  # What is not by element all ranks have alike.
                        self._put(name, value)
                else:
                    self._items[name] = Boxes.chunk(value, shard.parameter.shape, shard.strides, held[0])
        else:
            own = its["state"]
            rest = {"state": dict(own["state"]), "entries": entries_of(own)}
            rest |= {"options": [options_of(group) for group in own["param_groups"]], "dtypes": None}
            for index, name in enumerate(names):
                for key, value in rest["state"].pop(index, {}).items():
                    self._put(f"{_STATE}{name}.{key}", value)
        for values, labels in zip(rest["options"], its["parameters"], strict=True):
            for key, value in {**values, "params": labels}.items() if self._run.rank == 0 else ():
                self._put(f"{_GROUPS}{self._groups}.{key}", value)
            self._groups += 1
        return {key: rest[key] for key in ("state", "entries", "dtypes")}

    def _put_rows(self, items: dict[str, Any]) -> None:
        from overlap._torch.checkpoint import Boxes

        run = self._run
        for is_same in (False, True):
            filled: dict[str, list[tuple[int, Tensor]]] = {}
            ends: dict[str, int] = {}
            for name, spans in _spans(self.decided, is_same=is_same).items():
                begun = {dtype: span.start for dtype, span in spans.items()}
                for leaf in self._parts[name].leaves if name in self._parts else ():
                    dtype = _name_of(leaf.dtype)
                    if leaf.numel():
                        filled.setdefault(dtype, []).append((begun[dtype], leaf))
                        begun[dtype] += leaf.numel()
                for dtype, span in spans.items():
                    filled.setdefault(dtype, [])
                    ends[dtype] = span.stop
            for dtype, parts in filled.items():
                size, kind = ends[dtype], getattr(torch, dtype)
                row, shape = (0, (1, size)) if is_same else (run.rank, (run.ranks, size))
                make = partial(_slice_of, parts, kind)
                items[f"{_ROWS[is_same]}.{dtype}"] = Boxes.row(row, shape, kind, range(size), make)
        for name, found in self.decided.items():
            if not found["is_alike"]:
                packed_here = [(0, self._parts[name].packed)] if name in self._parts else []
                make, shape = partial(_slice_of, packed_here, torch.uint8), (run.ranks, found["packed"])
                items[f"{_SKELETON}{name}"] = Boxes.row(run.rank, shape, torch.uint8, range(shape[1]), make)


def _slice_of(filled: Sequence[tuple[int, Tensor]], dtype: torch.dtype, start: int, end: int) -> Tensor:
    """A part of a row, which is zero where no tensor is."""
    made = torch.zeros(end - start, dtype=dtype, device="cpu")
    for begin, leaf in filled[max(0, bisect_right(filled, start, key=lambda one: one[0]) - 1) :]:
        if begin >= end:
            break
        first, last = max(start, begin), min(end, begin + leaf.numel())
        if first < last:
            made[first - start : last - start] = leaf.reshape(-1)[first - begin : last - begin]
    return made


class _Found:
    """What ``folder`` has for this rank of ``run``."""

    def __init__(self, folder: Path, run: Run) -> None:
        self._path, self._run = folder, run
        self._folder = self._opened()
        self._wanted: dict[str, Boxes | None] = {}
        # Where the values that are not tensors go when they are read.
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._manifest: dict[str, Any] = {"ranks": run.ranks, "parts": {}, "objects": (), "optimizers": None}
        if _MANIFEST in self._folder.found:
            self._manifest = self._read({_MANIFEST: None})[_MANIFEST]
            if self._manifest["version"] != VERSION:
                raise ConfigurationError(f"{folder} was saved by another version of overlap, in another form")
        self._parts: Mapping[str, Any] = self._manifest["parts"]
        self._ranks: int = self._manifest["ranks"]
        self._is_other = self._ranks != run.ranks
        self._skeletons: dict[tuple[str, int], Any] = {}

    def _opened(self) -> Folder:
        from overlap._torch.checkpoint import Folder

        try:
            return Folder(str(self._path))
        except FileNotFoundError as error:
            raise ConfigurationError(
                f"{self._path} has no whole checkpoint: .metadata is missing, which is written last, so there is none, "
                "or its save was interrupted: load the one before"
            ) from error
        except Exception as error:
            raise self._damaged(error) from error

    def _read(self, wanted: Mapping[str, Boxes | None]) -> dict[str, Any]:
        try:
            return self._folder.read(wanted)
        except Exception as error:
            raise self._damaged(error) from error

    def _damaged(self, error: Exception) -> ConfigurationError:
        return ConfigurationError(f"{self._path} is damaged, load the one before: {type(error).__name__}: {error}")

    def state(self) -> dict[str, Any]:
        """As :func:`overlap.state_dict` on this rank, but for what :meth:`fill` reads."""
        run = self._run
        pickled = [name for name in self._folder.found if self._folder.is_pickled(name) and not self._parts]
        if (states := states_in(pickled, lambda name: self._read({name: None})[name], run)) is not None:
            is_own = len(states) == 1 and states[0]["ranks"] == run.ranks
            return dict(states[0] if is_own else run.state_of_rank(states))
        if "apart" in self._parts and self._is_other:
            raise ConfigurationError(
                f"{self._path} was saved while ranks had different models, by {self._ranks} ranks, and here are "
                f"{run.ranks}: save where ranks have just averaged, or resume with as many ranks as before"
            )
        optimizers, old = self._optimizers(), run.rank % self._ranks
        model = {name: value for part in ("model", "apart") for name, value in self._part(part, old).items()}
        for name in self._folder.found:
            if name.startswith(_MODEL) and (plain := name.removeprefix(_MODEL)) not in model:
                self._want(name, model, plain)
        place = {"version": VERSION, "rank": run.rank, "ranks": run.ranks}
        return {**place, "model": model, "optimizer": optimizers, "stages": self._stages()}

    def fill(self) -> None:
        """Read the rest of what :meth:`state` returned."""
        for name, value in self._read(self._wanted).items():
            values, key = self._places[name]
            values[key] = value

    def loop(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What the loop has added. Raises: ConfigurationError: something ``given`` was not saved, or is of a rank."""
        saved = {
            name.removeprefix(_LOOP): told["is_same"] for name, told in self._parts.items() if name.startswith(_LOOP)
        }
        objects = self._manifest["objects"]
        for name, target in given.items():
            if not hasattr(target, "load_state_dict"):
                raise ConfigurationError(
                    f"{name}={told(target)} has no load_state_dict(): give objects; values are returned"
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
        """What may still refuse its state, with its state, which it may keep."""
        run = self._run
        if run.stage is not None and self._manifest.get("signature") != run.stage.signature:
            yield run.stage, state["stages"]["state"]
        for optim, its in zip(run.optimizers, state["optimizer"], strict=True):
            if isinstance(optim, LocalSGD):
                yield optim, copy.deepcopy(its["state"])
        for name, target in given.items():
            yield target, snapshot(self._part(f"{_LOOP}{name}", run.rank))

    def _want(self, name: str, values: dict[str, Any], key: str) -> None:
        """Have ``values[key]`` read."""
        from overlap._torch.checkpoint import Boxes

        values[key] = None if self._folder.is_pickled(name) else self._folder.empty(name)
        self._places[name] = values, key
        self._wanted[name] = None if values[key] is None else Boxes.whole(values[key], is_read=True)

    # Rows.

    def _skeleton(self, part: str, rank: int) -> Any:
        if part not in self._parts:
            return {}
        if self._parts[part]["is_alike"]:
            return self._manifest["skeletons"][part]
        if (part, rank) not in self._skeletons:
            size = self._parts[part]["packed"]
            data = torch.empty(size, dtype=torch.uint8, device="cpu")
            self._read_row(f"{_SKELETON}{part}", rank, data, 0)
            self._skeletons[part, rank] = unpacked(data)
        return self._skeletons[part, rank]

    def _read_row(self, name: str, row: int, buffer: Tensor, start: int) -> None:
        from overlap._torch.checkpoint import Boxes

        shape, span = self._folder.found[name].size, range(start, start + buffer.numel())
        boxes = Boxes.row(row, shape, buffer.dtype, span, lambda a, b: buffer[a - start : b - start], is_read=True)
        self._read({name: boxes})

    def _part(self, part: str, rank: int, path: Sequence[str] = ()) -> Any:
        """What a rank has of a part under ``path``; tensors are views of few, so who keeps them copies them."""
        skeleton, before = self._skeleton(part, rank), Counter[torch.dtype]()
        for key in path:
            for other, value in skeleton.items():
                if other == key:
                    break
                before.update(sizes_of(value))
            skeleton = skeleton.get(key, {})
        is_same = part in self._parts and self._parts[part]["is_same"]
        buffers: dict[torch.dtype, Tensor] = {}
        for dtype, size in sizes_of(skeleton).items():
            buffers[dtype], name = torch.empty(size, dtype=dtype, device="cpu"), _name_of(dtype)
            if size:
                start = _spans(self._parts, is_same=is_same)[part][name].start + before[dtype]
                self._read_row(f"{_ROWS[is_same]}.{name}", 0 if is_same else rank, buffers[dtype], start)
        taken: Counter[torch.dtype] = Counter()

        def take(dtype: torch.dtype, shape: torch.Size) -> Tensor:
            begin = taken[dtype]
            taken[dtype] += shape.numel()
            return buffers[dtype][begin : taken[dtype]].view(shape)

        return joined(skeleton, take)

    def _of_ranks(self, part: str) -> StatesOfRanks:
        def keys(rank: int, path: tuple[str, ...]) -> Sequence[str]:
            found = self._skeleton(part, rank)
            for key in path:
                found = found.get(key, {})
            return list(found) if isinstance(found, Mapping) else ()

        return StatesOfRanks(self._ranks, partial(self._part, part), keys)

    # Parts of the state.

    def _stages(self) -> dict[str, Any] | None:
        run = self._run
        has_memory = any(self._skeleton("stages", rank) for rank in range(self._ranks)) if self._parts else False
        if run.stage is None:
            return None if not has_memory else {"classes": self._manifest["classes"], "state": {}}
        if not has_memory and self._manifest.get("classes", ...) != run.classes:
            # Of other stages, or none; these begin anew, if they have not begun.
            with uncopied():
                if run.stage.state_dict():
                    raise ConfigurationError(
                        f"{self._path} has no memory of stages, and {run.stage!r} has some of its own passes: load "
                        "before the first forward, and its stages begin anew"
                    )
            return {"classes": run.classes, "state": {}}
        state = self._part("stages", run.rank) if not self._is_other else None
        if state is None:
            states = self._of_ranks("stages")
            state = redistributed(run.stage, states, rank=run.rank, ranks=run.ranks)
        return {"classes": self._manifest["classes"], "state": state}

    def _optimizers(self) -> list[dict[str, Any]]:
        run, found = self._run, self._folder.found
        groups: list[dict[str, Any]] = []
        for name in found:
            if name.startswith(_GROUPS):
                _, _, number, key = name.split(".", 3)
                groups += [{} for _ in range(int(number) + 1 - len(groups))]
                self._want(name, groups[int(number)], key)
        self.fill()
        self._wanted.clear()
        records, here = self._manifest["optimizers"], [len(one.param_groups) for one in run.optimizers]
        if records is None:  # PyTorch's own.
            ends = [0, *accumulate(here)]
            parts = [groups[start:end] for start, end in pairwise([*ends[:-1], max(ends[-1], len(groups))])]
            records = [
                {"class": run.class_of(place), "parameters": [group["params"] for group in part], "is_own": False}
                for place, part in enumerate(parts)
                if groups
            ]
        keys_of = _keys_of(found, {name for n, one in enumerate(records) for name in _names_of(one["parameters"], n)})
        begun, states = 0, []
        for place, record in enumerate(records):
            state = {key: record[key] for key in ("class", "parameters")}
            if place < len(run.optimizers):
                if _inner_class(record["class"]) == _inner_class(run.class_of(place)):
                    state["class"] = run.class_of(place)
                if record["is_own"]:
                    states_of = self._of_ranks(f"optimizer.{place}")
                    its = states_of[run.rank] if not self._is_other else run.redistributed(place, states_of)
                    state = snapshot(its)
                else:
                    end = begun + len(record["parameters"])
                    state |= self._optimizer(place, record, groups[begun:end], keys_of)
                    begun = end
            states.append(state)
        return states

    def _optimizer(
        self, place: int, record: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], keys_of: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The state of one whose parameters ranks have in common."""
        from overlap._torch.checkpoint import Boxes

        optim, names = self._run.optimizers[place], _names_of(record["parameters"], place)
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        kept = {"state": record.get("state", {}), "entries": record.get("entries", {})}
        if not isinstance(optim, ZeroRedundancyOptimizer):
            state: dict[Any, Any] = {**kept["state"]}
            for index, name in enumerate(names):
                for key in keys_of.get(name, ()):
                    self._want(f"{_STATE}{name}.{key}", state.setdefault(index, {}), key)
            numbers = iter(range(len(names)))
            numbered = [
                {**group, "params": [next(numbers) for _ in labels]}
                for group, labels in zip(options, record["parameters"], strict=True)
            ]
            return {"state": {**kept["entries"], "state": state, "param_groups": numbered}}
        own = optim.sharded_state()
        numbers_of = [len(labels) for labels in record["parameters"]]
        manifest = own.manifest(**kept, options=options, groups=numbers_of, dtypes=record.get("dtypes"))
        pieces: dict[str, Any] = {MANIFEST: manifest}
        for index, (shard, name) in enumerate(zip(own.shards, names, strict=False)):
            for key in keys_of.get(name, ()) if shard.own is not None else ():
                saved = f"{_STATE}{name}.{key}"
                found = self._folder.found[saved]
                if self._folder.is_pickled(saved) or found.size != shard.parameter.shape:
                    self._want(saved, pieces, f"{index}/{key}")
                    continue
                start, end = needed(shard)
                flat = torch.empty(end - start, dtype=found.properties.dtype, device="cpu")
                pieces[f"{index}/{key}/{start}:{end}"] = flat
                self._wanted[saved] = Boxes.chunk(
                    flat, shard.parameter.shape, shard.parameter.stride(), start, is_read=True
                )
        return {"own": pieces}


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


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
