"""The states of all ranks as one object, for frameworks that save one file for all."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from overlap._checks import check_ddp, check_flag
from overlap.errors import ConfigurationError
from overlap.hooks.stage import walk
from overlap.ranks.board import agree, of_all_ranks
from overlap.resume.state import Optim, Run, stage_of

__all__ = ["TrainState", "remembers"]

_KEY = "overlap"


class TrainState:
    """The states of all ranks of a run, for code that saves one file and calls ``state_dict`` and ``load_state_dict``.

    Frameworks save the model and the optimizer of rank 0, and silently lose the state of each rank's stages. Give them
    this object, and that state is saved and loaded with the rest::

        dcp.save({"run": overlap.TrainState(ddp, optim), ...}, checkpoint_id=folder)

    Call both methods on every rank; any rank may write the file. What is the same on all ranks, such as the model and a
    plain optimizer, is stored once.

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
        self._ddp, self._optim = check_ddp(ddp), optim
        self._stages_only = check_flag("stages_only", stages_only)

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks, as bytes: the same on every rank.

        Communication: two gathers on the model's process group, the second of all that ranks do not have alike.

        Raises:
            TrainingLoopError, ConfigurationError: as :func:`overlap.state_dict`.
        """
        return self.gathered(self.rank_state_dict())

    def gathered(self, parts: Mapping[str, Any]) -> dict[str, Any]:
        """:meth:`state_dict` of what :meth:`rank_state_dict` has returned on each rank, with its communication."""
        group = self._ddp.process_group
        own = {key: _to_bytes(part) for key, part in parts.items()}
        agree(group, "gather the state of a TrainState")
        digests = of_all_ranks({key: hashlib.sha256(part).hexdigest() for key, part in own.items()}, group)
        shared = {key for key in own if len({one[key] for one in digests}) == 1}
        alone = {key: part for key, part in own.items() if key not in shared}
        whole = {"shared": {key: own[key] for key in sorted(shared)}, "own": of_all_ranks(alone, group)}
        return {_KEY: _to_bytes(whole)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's state of what :meth:`state_dict` returned, on any number of ranks.

        Raises:
            ConfigurationError, TrainingLoopError: as :func:`overlap.load_state_dict`.
        """
        if set(state_dict) != {_KEY}:
            raise ConfigurationError(
                f"this is not the state of a TrainState: its keys are {sorted(map(str, state_dict))}"
            )
        whole = _from_bytes(state_dict[_KEY])
        states = [{key: _from_bytes(part) for key, part in {**whole["shared"], **own}.items()} for own in whole["own"]]
        if any(map(remembers, states)):
            run = Run(self._ddp, self._optim, "load_state_dict")
            run.load_state_dict(run.state_of_rank(states), stages_only=self._stages_only)
        else:
            self.forget()  # The framework has loaded all that there is.

    def rank_state_dict(self) -> dict[str, Any]:
        """This rank's part alone, for frameworks where each rank writes a file of its own. Without communication.

        Raises:
            TrainingLoopError, ConfigurationError: as :func:`overlap.state_dict`.
        """
        return Run(self._ddp, self._optim, "state_dict").state_dict(stages_only=self._stages_only)

    def load_rank_state_dict(self, parts: Mapping[str, Any]) -> None:
        """Load what :meth:`rank_state_dict` returned on this rank.

        Raises:
            ConfigurationError, TrainingLoopError: as :func:`overlap.load_state_dict`.
        """
        if remembers(parts):
            Run(self._ddp, self._optim, "load_state_dict").load_state_dict(parts, stages_only=self._stages_only)
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
    """Whether a rank's state has anything in it: the model, the optimizer, or what a stage remembers."""
    return "model" in parts or "optimizer" in parts or bool((parts["stages"] or {}).get("state"))


def _to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
