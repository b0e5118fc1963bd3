"""The checkpoints of a trial, a file a rank, and a save in which the process is killed."""

import contextlib
import io
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def file_of(folder: Path, step: int, rank: int) -> Path:
    """Where a rank saves a step."""
    return folder / f"step-{step}-rank-{rank}.pt"


def save(state: Any, path: Path) -> None:
    """`path` holds all of it, or is not there."""
    data = io.BytesIO()
    torch.save(state, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_bytes(data.getbuffer())
    beside.replace(path)


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def latest_step(folder: Path, ranks: int) -> int | None:
    """The latest step that all ranks have saved."""
    found = [re.fullmatch(r"step-(\d+)-rank-\d+", path.stem) for path in folder.glob("*.pt")]
    steps = [int(match[1]) for match in found if match is not None]
    return max((step for step in steps if steps.count(step) == ranks), default=None)


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
