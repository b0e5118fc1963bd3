"""The states of all ranks as one object, for frameworks that save one file for all."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from overlap._checks import check_ddp
from overlap.errors import ConfigurationError
from overlap.resume.rank_state import Optim, load_state_dict, state_dict

__all__ = ["TrainState"]

_KEY = "overlap"


class TrainState:
    """The states of all ranks of a run, for code that saves one file and calls ``state_dict`` and ``load_state_dict``.

    Frameworks save the model and the optimizer of rank 0. What each rank's stages remember is lost there without a
    word; hand them this object, and it is saved and loaded with the rest::

        accelerator.register_for_checkpointing(overlap.TrainState(ddp, optim))
        dcp.save({"run": overlap.TrainState(ddp, optim), ...}, checkpoint_id=folder)

    Both methods are called on every rank, and any rank may write the file. What all ranks have alike, such as the model
    and a plain optimizer, is in it once.

    Args:
        ddp: the model, with its stages registered.
        optim: the optimizer of the training loop, or a list of all where it has several; where ``None`` no optimizer is
            saved.
    """

    def __init__(self, ddp: DistributedDataParallel, optim: Optim = None) -> None:
        self._ddp = ddp
        self._optim = optim

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks, as bytes, the same on every rank.

        Issues: two gathers on the model's process group, the second of all that ranks do not have alike.

        Raises:
            TrainingLoopError, ConfigurationError: as :func:`overlap.state_dict`.
        """
        group = check_ddp(self._ddp).process_group
        own = {key: _to_bytes(part) for key, part in state_dict(self._ddp, self._optim).items()}
        digests = _gathered({key: hashlib.sha256(part).hexdigest() for key, part in own.items()}, group)
        shared = {key for key in own if len({one[key] for one in digests}) == 1}
        gathered = _gathered({key: part for key, part in own.items() if key not in shared}, group)
        whole = {"shared": {key: own[key] for key in sorted(shared)}, "own": gathered}
        return {_KEY: _to_bytes(whole)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's state of what :meth:`state_dict` returned.

        Raises:
            ConfigurationError, TrainingLoopError: as :func:`overlap.load_state_dict`.
        """
        if set(state_dict) != {_KEY}:
            raise ConfigurationError(
                f"this is not the state of a TrainState: its keys are {sorted(map(str, state_dict))}"
            )
        whole = _from_bytes(state_dict[_KEY])
        group = check_ddp(self._ddp).process_group
        if len(whole["own"]) != group.size():
            raise ConfigurationError(
                f"the state was saved by {len(whole['own'])} ranks, and here are {group.size()}: for another number of "
                "ranks see docs/resuming.md"
            )
        parts = {**whole["shared"], **whole["own"][group.rank()]}
        load_state_dict(self._ddp, self._optim, {key: _from_bytes(part) for key, part in parts.items()})


def _gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def _to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
