"""Files in a framework's checkpoint, one per rank, with the state of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from overlap.errors import ConfigurationError
from overlap.integrations._run import Run
from overlap.resume.train_state import remembers

__all__ = ["load", "save"]


def save(folder: str | Path, rank: int, runs: Sequence[Run]) -> None:
    """Write this rank's file, if there is anything to write. Issues nothing: no rank waits for another.

    Raises:
        TrainingLoopError, ConfigurationError: as :func:`overlap.state_dict`.
    """
    file, states = _file(folder, rank), [run.state.rank_state_dict() for run in runs]
    if not any(map(remembers, states)):
        file.unlink(missing_ok=True)  # Of a run that was saved there before.
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(states, file)


def load(folder: str | Path, rank: int, runs: Sequence[Run]) -> None:
    """Load this rank's file; if no rank has one, stages start without state.

    Raises:
        ConfigurationError: other ranks have one, or it is of other stages or of another number of ranks.
    """
    file = _file(folder, rank)
    if not file.is_file():
        if others := sorted(path.name for path in file.parent.glob(_file(folder, "*").name)):
            raise ConfigurationError(
                f"{file.parent} has {others[0]} and lacks {file.name}: every rank saves, and as many ranks resume; "
                f"delete {_file('', '*')} to start without their state"
            )
        for run in runs:
            run.state.forget()
        return
    states: list[Mapping[str, Any]] = torch.load(file, map_location="cpu", weights_only=True)
    if len(states) != len(runs):
        raise ConfigurationError(f"{file} is of {len(states)} models with a chain, and here are {len(runs)}")
    for run, state in zip(runs, states, strict=True):
        try:
            run.state.load_rank_state_dict(state)
        except ConfigurationError as error:
            error.add_note(f"from {file}; delete {_file('', '*')} there to start without their state")
            raise


def _file(folder: str | Path, rank: int | str) -> Path:
    return Path(folder) / f"overlap-rank-{rank}.pt"
