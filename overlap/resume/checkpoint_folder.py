"""Checkpoints on a disk: folders that are complete or do not exist, and a file that points to the latest of them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from overlap.errors import CheckpointError
from overlap.resume.checksums import SUMS, check_file, check_files, digest_of, read_sums, sync, write_sums

__all__ = ["CheckpointFolder"]

_LATEST = "latest"
# The second form where the latest checkpoint is of the same step: it stays until this one is there.
_NAME = re.compile(r"step-(0|[1-9]\d*)(\.again)?")


class CheckpointFolder:
    """The checkpoints in ``root``, each a folder ``step-N``; one process at a time changes them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def latest(self) -> str | None:
        """The name of the latest checkpoint.

        Raises:
            CheckpointError: the file that points to it is damaged, or points to nothing that was saved.
        """
        pointer = self.root / _LATEST
        if not pointer.exists():
            return None
        (target, digest), *others = read_sums(pointer).items()
        name = target.removesuffix(f"/{SUMS}")
        if others or name == target or not _NAME.fullmatch(name):
            raise CheckpointError(f"{pointer} is damaged: it does not point to a checkpoint")
        if not (self.root / target).exists():
            raise CheckpointError(f"{self.root / target} is missing, to which {pointer} points")
        check_file(self.root / target, digest, by=str(pointer))
        return name

    def names(self) -> list[str]:
        """The names of all checkpoints, in the order of their steps."""
        found = [entry.name for entry in self.root.iterdir()] if self.root.is_dir() else []
        return sorted((name for name in found if _NAME.fullmatch(name)), key=self.step_of)

    @staticmethod
    def step_of(name: str) -> int:
        """The step of a checkpoint."""
        match = _NAME.fullmatch(name)
        assert match is not None, "asked of the names of checkpoints"
        return int(match[1])

    def find(self, step: int | None) -> Path:
        """The checkpoint of a step, or the latest one.

        Raises:
            CheckpointError: there is none; or as :meth:`latest`.
        """
        # There are two of one step only where a process has ended while it saved; both are whole.
        of_step = [name for name in self.names() if self.step_of(name) == step]
        name = self.latest() if step is None else max(of_step, default=None)
        if name is None:
            what = "checkpoint" if step is None else f"checkpoint of step {step}"
            raise CheckpointError(f"{self.root} has no {what}; in it are {self.names() or 'none'}")
        return self.root / name

    def make(self, step: int) -> Path:
        """An empty folder for a new checkpoint; clears away what earlier runs have left unfinished."""
        self.root.mkdir(parents=True, exist_ok=True)
        for left in self.root.glob("step-*.part"):
            shutil.rmtree(left)
        try:
            latest = self.latest()
        except CheckpointError:
            latest = None
        name = f"step-{step}" if latest != f"step-{step}" else f"step-{step}.again"
        path = self.root / f"{name}.part"
        path.mkdir()
        return path

    def publish(self, path: Path, sums: Mapping[str, str], *, keep_last: int | None) -> None:
        """Make a folder that is written the latest checkpoint; ``sums`` has the digests of all files in it."""
        if not sums:
            raise CheckpointError(f"no file was written to {path}")
        check_files(path, sums)
        write_sums(path / SUMS, sums)
        final = path.with_name(path.name.removesuffix(".part"))
        self._remove(final.name)  # Of a run that has gone back to before it.
        path.rename(final)
        sync(self.root)
        write_sums(self.root / _LATEST, {f"{final.name}/{SUMS}": digest_of(final / SUMS)})
        others = [name for name in reversed(self.names()) if name != final.name]
        same = [name for name in others if self.step_of(name) == self.step_of(final.name)]
        older = [name for name in others if name not in same]
        for name in same + (older[keep_last - 1 :] if keep_last is not None else []):
            self._remove(name)

    def _remove(self, name: str) -> None:
        """Remove a checkpoint, so that at no time a part of it has its name."""
        if (path := self.root / name).exists():
            left = path.rename(path.with_name(f"{name}.old.part"))
            shutil.rmtree(left)
