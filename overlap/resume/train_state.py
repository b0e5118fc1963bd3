"""A run for code that calls ``state_dict`` and ``load_state_dict``: PyTorch's checkpoints, and frameworks."""

from __future__ import annotations

import io
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap._checks import check_ddp, check_flag
from overlap._torch.c10d import side_group
from overlap.errors import ConfigurationError
from overlap.hooks.stage import walk
from overlap.hooks.states import memory_is_saved
from overlap.optim import ZeroRedundancyOptimizer
from overlap.ranks.board import Agreement
from overlap.ranks.values import mapped, receive, send, snapshot, split
from overlap.resume.state import Optim, RankState, stage_of

_KEY = "overlap"
_COMMON = "common"
_OWN = "rank {} of {} (where another number of ranks has saved, overlap.load(folder, ddp, optim) loads it)"
_OWN_NAME = re.compile(r"(?:(.*)\.)?rank (\d+) of (\d+) \(where .*")


class TrainState:
    """A run for ``torch.distributed.checkpoint``, beside other values, where :func:`overlap.save` does not fit::

        dcp.save({"run": overlap.TrainState(ddp, optim), ...}, checkpoint_id=folder)

    ``dcp.save``, ``dcp.async_save`` and, on as many ranks as have saved, ``dcp.load`` take it; :func:`overlap.load`
    loads such a folder on any number. State that is the same on all ranks, such as parameters and a plain optimizer, is
    written once. While it is written, a rank's memory rises by its largest part.

    Frameworks that save one file save the model and the optimizer of rank 0, and silently lose the state of each rank's
    stages: give them :meth:`gathered`.

    Args:
        ddp: the model, with its stages registered.
        optim: the optimizer of the training loop, or a list of all where it has several; where ``None`` no optimizer is
            saved.
        stages_only: leave out the model and the optimizers, if they are the same on all ranks and the framework saves
            and loads them itself. A state in which no stage remembers anything then loads at any number of ranks and
            with any stages.

    >>> optim = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))
    >>> chain(AllReduce(), Step(optim)).register(ddp)
    <chain(AllReduce(), Step(SGD, interleaved)) registered>
    >>> run = TrainState(ddp, optim)
    >>> run.load_state_dict(run.state_dict())
    """

    def __init__(self, ddp: DistributedDataParallel, optim: Optim = None, *, stages_only: bool = False) -> None:
        memory_is_saved()
        self._ddp, self._optim = check_ddp(ddp), optim
        self._stages_only = check_flag("stages_only", stages_only)

    def _run(self, function: str) -> RankState:
        return RankState(self._ddp, self._optim, function)

    def state_dict(self) -> dict[str, Any]:
        """The entries of this rank for a file of all: one value that all ranks have in common, and one of its own. They
        are to be written or copied before the next forward.

        Communication: none.

        Raises:
            TrainingLoopError, ConfigurationError: as :func:`overlap.state_dict`.
        """
        run = self._run("state_dict")
        common, own = _divided(run, run.state(stages_only=self._stages_only))
        return {_COMMON: _Pickled(common), _OWN.format(run.rank, run.ranks): _Pickled(own)}

    def gathered(self, parts: Mapping[str, Any] | None = None, *, to: int = 0) -> dict[str, Any] | None:
        """One value for a file of all ranks, of tensors and plain values, on rank ``to``; ``None`` on the others.
        :meth:`load_state_dict` takes it on any number of ranks.

        Args:
            parts: a state that :meth:`rank_state_dict` has returned; the present one where ``None``.
            to: the rank that writes the file.

        Communication: one agreement, and then its own state from each rank to rank ``to``, a tensor at a time.

        Raises:
            TrainingLoopError, ConfigurationError: as :func:`overlap.state_dict`.
        """
        with Agreement(self._ddp.process_group, "gather the state of a TrainState") as agreement:
            run = self._run("gathered")
            common, own = _divided(run, run.state(stages_only=self._stages_only) if parts is None else parts)
            if not 0 <= to < run.ranks:
                raise ConfigurationError(f"gathered(to={to}): ranks of the group are 0 to {run.ranks - 1}")
            split([common, own])  # A value that cannot be sent is refused before any rank sends.
            agreement.agree()
        group = side_group(self._ddp.process_group)
        if run.rank != to:
            send(own, to, group)
            return None
        common = snapshot(common)
        each = [snapshot(own) if rank == to else receive(rank, group) for rank in range(run.ranks)]
        return {_KEY: [_whole(common, one) for one in each]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a value that :meth:`state_dict` returned on as many ranks, or :meth:`gathered` on
        any number.

        Raises:
            ConfigurationError, TrainingLoopError: as :func:`overlap.load_state_dict`.
        """
        run = self._run("load_state_dict")
        own = _OWN.format(run.rank, run.ranks)
        if set(state_dict) == {_KEY}:
            states = _of_one_file(state_dict[_KEY])
            self.load_rank_state_dict(run.state_of_rank(states) if any(map(remembers, states)) else states[0])
        elif {_COMMON, own} <= set(state_dict):
            common, its = (_value_of(state_dict[key]) for key in (_COMMON, own))
            self.load_rank_state_dict(_whole(common, its))
        else:
            raise ConfigurationError(
                f"this is not the state of a TrainState with {own!r}: its keys are {sorted(map(str, state_dict))}"
            )

    def rank_state_dict(self) -> dict[str, Any]:
        """This rank's part alone, for frameworks where each rank writes a file of its own. Without communication.

        Raises:
            TrainingLoopError, ConfigurationError: as :func:`overlap.state_dict`.
        """
        return self._run("state_dict").state_dict(stages_only=self._stages_only)

    def load_rank_state_dict(self, parts: Mapping[str, Any]) -> None:
        """Load a state that :meth:`rank_state_dict` returned on this rank.

        Raises:
            ConfigurationError, TrainingLoopError: as :func:`overlap.load_state_dict`.
        """
        if remembers(parts):
            self._run("load_state_dict").load_state_dict(parts, stages_only=self._stages_only)
        else:
            self.forget()  # The framework has loaded all that there is.

    def forget(self) -> None:
        """Reset the stages, as if they had never had state."""
        stage = stage_of(self._ddp) if self._stages_only else None
        for one in () if stage is None else walk(stage):
            if not one.children and one.state_dict():
                with suppress(ConfigurationError):  # One that has a state from the start keeps it.
                    one.load_state_dict({})


def remembers(parts: Mapping[str, Any]) -> bool:
    """Whether a rank's state has anything in it: the model, the optimizer, or the memory of a stage."""
    return "model" in parts or "optimizer" in parts or bool((parts["stages"] or {}).get("state"))


class _Pickled:
    """A value that ``torch.distributed.checkpoint`` pickles when it writes it, as a whole; loaded, it is a dict."""

    def __init__(self, value: dict[str, Any]) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(mapped(self.value, _compact).items())

    def __deepcopy__(self, memo: Any) -> _Pickled:
        return _Pickled(snapshot(self.value))


def _compact(leaf: Any) -> Any:
    """A tensor in CPU memory that is no part of a larger one, which would be pickled as a whole."""
    if not isinstance(leaf, Tensor):
        return leaf
    there = leaf.detach().cpu()
    return there if there.untyped_storage().nbytes() == there.nbytes else there.clone()


def _value_of(found: Any) -> Any:
    return found.value if isinstance(found, _Pickled) else found


def _divided(run: RankState, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The part of a rank's ``state`` that all have in common, by declaration, and the rest."""
    own, common = dict(state), dict[str, Any]()
    if "model" in state and not run.trains_apart:
        # Buffers that DDP broadcasts are those of rank 0, whose value need not be the one that is written.
        is_common = {name: run.has_common(name) and name in run.parameters for name in state["model"]}
        alone = [run.is_own(n) or isinstance(one, ZeroRedundancyOptimizer) for n, one in enumerate(run.optimizers)]
        optimizers = {str(place): one for place, one in enumerate(state["optimizer"])}
        for part, is_own in ((common, False), (own, True)):
            part["model"] = {name: value for name, value in state["model"].items() if is_common[name] is not is_own}
            part["optimizer"] = {place: one for place, one in optimizers.items() if alone[int(place)] is is_own}
    return common, own


def _whole(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The state that was divided."""
    if not common:
        return dict(own)
    optimizers = {**common["optimizer"], **own["optimizer"]}
    model = {**common["model"], **own["model"]}
    return {**own, "model": model, "optimizer": [optimizers[str(place)] for place in range(len(optimizers))]}


def _of_one_file(found: Any) -> list[dict[str, Any]]:
    """The states of all ranks; of version 0.1.0 in bytes."""
    if not isinstance(found, bytes):
        return list(found)
    whole = _from_bytes(found)
    return [{key: _from_bytes(part) for key, part in {**whole["shared"], **own}.items()} for own in whole["own"]]


def _from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def state_in(names: Collection[str], read: Callable[[str], Any], run: RankState) -> dict[str, Any] | None:
    """This rank's part of a :class:`TrainState` in a folder with these ``names``, of which ``read`` returns one;
    ``None`` where there is none."""
    for name in names:
        if name.rpartition(".")[2] == _KEY:
            return dict(run.upgraded(run.state_of_rank(_of_one_file(read(name)))))
    for match in filter(None, map(_OWN_NAME.fullmatch, names)):
        prefix, ranks = f"{match[1]}." if match[1] else "", int(match[3])
        wanted = [run.rank] if ranks == run.ranks else range(ranks)
        common = read(prefix + _COMMON)
        states = [_whole(common, read(prefix + _OWN.format(rank, ranks))) for rank in wanted]
        return states[0] if ranks == run.ranks else dict(run.state_of_rank(states))
    return None
