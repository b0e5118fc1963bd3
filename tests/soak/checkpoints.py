"""The checkpoints of a trial, and a save in which the process is killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from overlap import CheckpointError, CheckpointManager


def of(folder: Path) -> CheckpointManager:
    """Those in `folder`."""
    return CheckpointManager(folder / "checkpoints")


def save_end(state: Any, path: Path) -> None:
    """What a rank has at its end: `path` holds all of it, or is not there."""
    beside = path.with_name(f"{path.name}.part")
    torch.save(state, beside)
    beside.replace(path)


def load_end(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@contextlib.contextmanager
def killed_while_writing() -> Iterator[None]:
    """The process is killed when half of its file is written."""

    def write_bytes(path: Path, data: Any) -> int:
        with path.open("wb") as file:
            file.write(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    whole, Path.write_bytes = Path.write_bytes, write_bytes  # type: ignore[method-assign]
    try:
        yield
    finally:
        Path.write_bytes = whole  # type: ignore[method-assign]


def damaged(folder: Path, ranks: int) -> list[str]:
    """What is wrong with the checkpoints of a trial; all ranks must be able to load each."""
    found = []
    for step in (manager := of(folder)).steps():
        try:
            manager.path(step)
            if len(states := manager.load_all(step)) != ranks:
                found.append(f"step {step} has the states of {len(states)} of {ranks} ranks")
        except CheckpointError as error:
            found.append(str(error))
    return found
