"""Saves checkpoints of a run on all ranks, and finds the latest complete one."""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from overlap._checks import check_whole_number, described
from overlap._threads import start
from overlap.errors import CheckpointError, ConfigurationError, TrainingLoopError
from overlap.resume.all_ranks import AllRanks
from overlap.resume.checkpoint_folder import CheckpointFolder
from overlap.resume.checksums import SUMS, check_file, check_files, digest_of, files_in, read_sums, sync

__all__ = ["CheckpointManager"]

T = TypeVar("T")
Sums = dict[str, str]

_OF_RANK = re.compile(r"rank-(\d+)-of-(\d+)\.pt")


@dataclass(frozen=True)
class _Unfinished:
    """A checkpoint that is being written."""

    step: int
    path: Path
    finish: Callable[[], Sums] | None = None
    """Waits for this rank's file, and returns its digest by its name; ``None`` where the caller writes the files."""


class CheckpointManager:
    """Saves checkpoints of a run, and finds the latest complete one.

    A checkpoint is a folder ``step-N`` with files and their digests, ``SHA256SUMS``. It gets its name when all ranks
    have written it, and the file ``latest``, which points to it, is replaced after that: whatever fails meanwhile,
    ``latest`` is a complete checkpoint, the old one or the new one. If a file is changed, truncated or mixed up later,
    loading raises an error that names it. ``sha256sum --check`` reads both files, too.

    Call every method on every rank, in the same order; a failure on one rank is an error on all. The ranks need a
    shared file system.

    Args:
        folder: of one run; it is made when the first checkpoint is saved.
        keep_last: how many checkpoints to keep, the latest among them, and else those of the highest steps; others are
            deleted after a save. ``None`` keeps all.
        process_group: the ranks that save together; the default group where ``None``, or this process if there is none.

    Issues: some gathers of a few bytes on ``process_group``, in every method but :meth:`latest_step` and :meth:`steps`.

    >>> import tempfile
    >>> optim = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))
    >>> chain(AllReduce(), Step(optim)).register(ddp)
    <chain(AllReduce(), Step(SGD, interleaved)) registered>
    >>> checkpoints = CheckpointManager(tempfile.mkdtemp(), keep_last=3)
    >>> checkpoints.save(100, overlap.state_dict(ddp, optim))  # each rank its own
    >>> checkpoints.latest_step()
    100
    >>> overlap.load_state_dict(ddp, optim, checkpoints.load())
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(folder, (str, os.PathLike)):
            raise ConfigurationError(f"folder is a path such as 'runs/1', got {described(folder)}")
        self.folder = Path(folder)
        self.keep_last = None if keep_last is None else check_whole_number("keep_last", keep_last, least=1)
        self._on_disk = CheckpointFolder(self.folder)
        self._all = AllRanks(process_group)
        self._own_file = f"rank-{self._all.rank}-of-{self._all.size}.pt"
        self._unfinished: _Unfinished | None = None

    def save(self, step: int, state: Any) -> None:
        """Save ``state`` of this rank, as :func:`overlap.state_dict` returns it; then it is the latest checkpoint.

        Needs as much memory as the file.

        Raises:
            CheckpointError: another rank could not save its own, and says why. That rank gets the error itself. The
                latest checkpoint does not change.
        """
        self.async_save(step, state)
        self.commit()

    def async_save(self, step: int, state: Any) -> None:
        """Copy ``state`` of this rank as it is now, and write it while training goes on.

        It becomes the latest checkpoint where ranks meet here again: in the next :meth:`commit`, :meth:`save`,
        :meth:`async_save` or :meth:`begin`. The copy takes as much memory as the file.
        """
        data = io.BytesIO()
        path = self._begin(step, lambda: torch.save(state, data)) / self._own_file
        written: Future[Sums] = Future()

        def write() -> None:
            try:
                path.write_bytes(data.getbuffer())
                sync(path)
                written.set_result({path.name: hashlib.sha256(data.getbuffer()).hexdigest()})
            except BaseException as error:
                written.set_exception(error)

        self._unfinished = _Unfinished(step, path.parent, written.result)
        start(write, "overlap-checkpoint")

    @contextmanager
    def saving(self, step: int) -> Iterator[Path]:
        """A context for files that you write yourself, on any of the ranks::

        with checkpoints.saving(step) as folder:
            torch.distributed.checkpoint.save(state, checkpoint_id=folder)
        """
        path = self.begin(step)
        try:
            yield path
        except Exception as error:
            failed: Future[Sums] = Future()
            failed.set_exception(error)
            self._unfinished = _Unfinished(step, path, failed.result)
        except BaseException:
            self._unfinished = None
            raise
        self.commit()

    def begin(self, step: int) -> Path:
        """An empty folder for the files of a checkpoint, which :meth:`commit` makes the latest one, some steps later::

            future = torch.distributed.checkpoint.async_save(state, checkpoint_id=checkpoints.begin(step))
            ...
            checkpoints.commit(future)

        Raises:
            TrainingLoopError: another one was begun, and not committed.
            ConfigurationError: ranks give different steps.
        """
        return self._begin(step, lambda: None)

    def commit(self, future: Future[Any] | None = None) -> None:
        """Make what was begun the latest checkpoint, once all ranks have written it; if nothing was, do nothing.

        Args:
            future: to wait for, of what writes the files.

        Raises:
            CheckpointError: as :meth:`save`.
        """
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is None:
            return
        path, doing = unfinished.path, f"save step {unfinished.step} to {self.folder}"

        def finish() -> Sums:
            if future is not None:
                future.result()
            return {} if unfinished.finish is None else unfinished.finish()

        self._all.meet("commit a checkpoint")
        sums = _merged(self._all.each(doing, finish))

        def others() -> Sums:
            names = [name for name in files_in(path) if name not in sums][self._all.rank :: self._all.size]
            for name in names:
                sync(path / name)
            return {name: digest_of(path / name) for name in names}

        sums |= _merged(self._all.each(doing, others))

        def publish() -> None:
            if self._all.rank == 0:
                self._on_disk.publish(path, sums, keep_last=self.keep_last)

        self._all.each(doing, publish)

    def latest_step(self) -> int | None:
        """The step of the latest checkpoint; ``None`` where there is none.

        Raises:
            CheckpointError: ``latest`` is damaged, or does not point to what was saved; see :meth:`steps` for others.
        """
        name = self._on_disk.latest()
        return None if name is None else self._on_disk.step_of(name)

    def steps(self) -> list[int]:
        """The steps of all checkpoints that are there, in order; loading one shows whether it is what was saved."""
        return sorted({self._on_disk.step_of(name) for name in self._on_disk.names()})

    def load(self, step: int | None = None) -> Any:
        """What :meth:`save` was given on this rank, at ``step`` or in the latest checkpoint; tensors in CPU memory.

        Raises:
            CheckpointError: there is none, or a file is not what was saved, which the message names, on whatever rank.
            ConfigurationError: another number of ranks saved it: take :meth:`load_all`.
        """
        return self._load(step, lambda path, sums: _read(path, self._own_file, sums))

    def load_all(self, step: int | None = None) -> list[Any]:
        """What :meth:`save` was given on every rank, by rank, whatever their number; raises as :meth:`load`."""

        def read(path: Path, sums: Sums) -> list[Any]:
            by_rank = sorted((int(match[1]), name) for name in sums if (match := _OF_RANK.fullmatch(name)))
            return [_read(path, name, sums) for name in [name for _, name in by_rank] or [self._own_file]]

        return self._load(step, read)

    def path(self, step: int | None = None) -> Path:
        """The folder of a checkpoint, all of whose files are what was saved, for code that reads them itself.

        Each rank checks a part of the files. Raises as :meth:`load`.
        """

        def check(path: Path, sums: Sums) -> Path:
            for name in sorted(sums)[self._all.rank :: self._all.size]:
                check_file(path / name, sums[name])
            return path

        return self._load(step, check)

    def _begin(self, step: int, prepare: Callable[[], object]) -> Path:
        if self._unfinished is not None and self._unfinished.finish is None:
            raise TrainingLoopError(
                f"step {step} begins before commit() of step {self._unfinished.step}, which may not be written yet: "
                "call commit() when it is"
            )
        self.commit()

        def make() -> tuple[int, str]:
            number = check_whole_number("step", step, least=0)
            prepare()
            return number, self._on_disk.make(number).name if self._all.rank == 0 else ""

        self._all.meet("save a checkpoint")
        everyone = self._all.each(f"save step {step} to {self.folder}", make)
        if len(steps := {given for given, _ in everyone}) > 1:
            raise ConfigurationError(f"step differs between ranks, {sorted(steps)}: save alike on all of them")
        self._unfinished = _Unfinished(step, self.folder / everyone[0][1])
        return self._unfinished.path

    def _load(self, step: int | None, read: Callable[[Path, Sums], T]) -> T:
        """What ``read`` makes of a checkpoint here, once it has made something of it on every rank."""
        found: list[T] = []

        def work() -> str:
            path = self._on_disk.find(step)
            sums = read_sums(path / SUMS)
            check_files(path, sums)
            found.append(read(path, sums))
            return path.name

        what = "the latest checkpoint" if step is None else f"step {step}"
        self._all.meet("load a checkpoint")
        names = self._all.each(f"load {what} of {self.folder}", work)
        if len(set(names)) > 1:
            raise CheckpointError(f"ranks find different checkpoints in {self.folder}, by rank {names}")
        return found[0]

    def __repr__(self) -> str:
        return f"CheckpointManager({str(self.folder)!r}, rank {self._all.rank} of {self._all.size})"


def _merged(sums: list[Sums]) -> Sums:
    return {name: digest for one in sums for name, digest in one.items()}


def _read(path: Path, name: str, sums: Sums) -> Any:
    if name not in sums:
        raise ConfigurationError(
            f"{path} has no {name}, but {', '.join(sorted(sums)[:3])}: use load_all() for a checkpoint of "
            "another number of ranks, and path() for files of your own"
        )
    check_file(path / name, sums[name])
    return torch.load(path / name, map_location="cpu", weights_only=True)
