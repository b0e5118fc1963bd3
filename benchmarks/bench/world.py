"""The processes that a rank trains in: forked children, the files they meet through, and their process group."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from benchmarks.bench.settings import RunConfig
from benchmarks.bench.variants import TrainingSetup
from benchmarks.models import Workload, workload
from benchmarks.simulated import SIMULATED_BACKEND, SimulatedLink, register_simulated_backend

_PR_SET_PDEATHSIG = 1
_STATUS_WIDTH = 160
_WRAPPING = "Got the following error when running the callback: "
# What the other ranks report when one rank has ended; never the reason why a variant failed.
_CONSEQUENCES = ("Connection closed by peer", "Connection reset", "Broken pipe", "did not reach")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one rank's child ended: with a value, or a failure in words and the Unix time when it was seen."""

    value: Any = None
    failure: str | None = None
    at: float = 0.0
    # Abort and kill come from the cause itself; an exception may follow from another rank's end.
    died: bool = False


def run_job(job: Callable[[IO[str]], Any], folder: Path, label: str, *, limit_s: float) -> Outcome:
    """Calls `job(terminal)` in a child and returns what it returns.

    The child's own output goes to `<label>.log` in `folder`; what it writes to `terminal` reaches the user.
    """
    result, log = folder / f"{label}.result", folder / f"{label}.log"
    child = multiprocessing.get_context("fork").Process(target=_run, args=(job, result, log))
    child.start()
    child.join(limit_s)
    if child.exitcode is None:
        child.kill()
        child.join()
        # It may have an answer and hang while it leaves.
        if not result.exists():
            return Outcome(failure=f"hangs: stopped after {limit_s:.0f} s", at=time.time())
    elif child.exitcode < 0:
        name = signal.Signals(-child.exitcode).name
        return Outcome(failure=_short(f"crashes: {name}: {_last_words(log)}"), at=time.time(), died=True)
    if not result.exists():
        return Outcome(failure=f"crashes: exit code {child.exitcode}", at=time.time(), died=True)
    outcome: Outcome = pickle.loads(result.read_bytes())
    return outcome


def first_failure(outcomes: Sequence[Outcome]) -> int | None:
    """The rank that a job failed on first, as far as can be told, or None where it failed on none."""
    failed = [rank for rank, one in enumerate(outcomes) if one.failure is not None]
    if not failed:
        return None

    def consequences_last(rank: int) -> tuple[bool, bool, float]:
        one = outcomes[rank]
        return not one.died, any(words in (one.failure or "") for words in _CONSEQUENCES), one.at

    return min(failed, key=consequences_last)


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, in whatever way."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _run(job: Callable[[IO[str]], Any], result: Path, log: Path) -> None:
    die_with_parent()
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        outcome = Outcome(value=job(terminal))
    except Exception as error:
        outcome = Outcome(failure=_short(_in_words(error)), at=time.time())
    result.write_bytes(pickle.dumps(outcome))


def _in_words(error: Exception) -> str:
    # What a future's callback raises comes wrapped once for every future on its way here.
    message = str(error).rpartition(_WRAPPING)[2]
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = lines[0] if lines else ""
    hung = "timed out" in text.lower()
    kind = "" if _WRAPPING in str(error) else f"{type(error).__name__}: "
    return f"{'hangs' if hung else 'refuses'}: {kind}{text}"


def _last_words(log: Path) -> str:
    """The line that says why a process aborted."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("what():")]
    words = (reasons or lines or ["no message"])[-1].removeprefix("what():").strip()
    # Where in Gloo's sources it was noticed says nothing to a reader of a table.
    return re.sub(r"^\[enforce fail at \S+\]\s*", "", words)


def _short(text: str) -> str:
    return text if len(text) <= _STATUS_WIDTH else f"{text[: _STATUS_WIDTH - 1]}…"


_POLL_S = 0.005


@dataclass(frozen=True, kw_only=True)
class FileExchange:
    """One rank's end of it; `folder` is the same for all ranks."""

    folder: Path
    rank: int
    ranks: int

    def exchange(self, name: str, value: Any, *, timeout_s: float) -> list[Any]:
        """Leaves `value` under `name`; waits for every rank's, and returns them by rank."""
        mine = self._path(name, self.rank)
        # Renamed into place: nobody reads half a file.
        mine.with_suffix(".part").write_bytes(pickle.dumps(value))
        mine.with_suffix(".part").rename(mine)
        deadline = time.monotonic() + timeout_s
        for rank in range(self.ranks):
            while not self._path(name, rank).exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(f"rank {rank} did not reach {name!r} within {timeout_s:.0f} s")
                time.sleep(_POLL_S)
        return [pickle.loads(self._path(name, rank).read_bytes()) for rank in range(self.ranks)]

    def _path(self, name: str, rank: int) -> Path:
        return self.folder / f"{name}.{rank}.pickle"


@dataclass(frozen=True, kw_only=True)
class BenchWorld:
    """A rank's process group while it is open, the device it computes on, and what it needs to train a variant."""

    config: RunConfig
    name: str
    device: torch.device
    files: FileExchange
    workload: Workload

    def training_setup(self, optimizer: str | None = None) -> TrainingSetup:
        """What one more variant is built from, with a group of its own; every rank must ask in the same order."""
        return TrainingSetup(
            settings=self.config.settings,
            workload=self.workload,
            device=self.device,
            group=dist.new_group(),
            is_simulated=self.config.link == "simulated",
            optimizer_name=optimizer or self.config.settings.optimizer,
        )

    def wait_for_ranks(self, label: str) -> None:
        """Returns once every rank is here; sends nothing over the group."""
        self.files.exchange(f"{self.name}-{label}", None, timeout_s=timeout_s(self.config))

    def synchronize(self) -> None:
        """Waits for the device; a step on CUDA has only been launched when it returns."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def timeout_s(config: RunConfig) -> float:
    """How long a collective may take before it counts as hung: generous for a model of 100 MB on this link."""
    speed = config.settings.bandwidth_bytes_per_s
    return 60.0 if speed is None else max(60.0, 10 * config.settings.ranks * 100e6 / speed)


@contextmanager
def open_world(config: RunConfig, rank: int, name: str) -> Iterator[BenchWorld]:
    """Opens the process group called `name` among the run's processes."""
    settings = config.settings
    device = torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    backend = "gloo" if device.type == "cpu" else "nccl"
    if config.link == "simulated":
        assert settings.bandwidth_bytes_per_s is not None
        link = SimulatedLink(bandwidth_bytes_per_s=settings.bandwidth_bytes_per_s, latency_s=settings.latency_us / 1e6)
        register_simulated_backend(link)
        backend = SIMULATED_BACKEND
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(Path(config.folder) / f"{name}.store"), config.processes),
        rank=rank,
        world_size=settings.ranks,
        timeout=timedelta(seconds=timeout_s(config)),
        device_id=device if backend == "nccl" else None,
    )
    files = FileExchange(folder=Path(config.folder), rank=rank, ranks=config.processes)
    yield BenchWorld(config=config, name=name, device=device, files=files, workload=workload(settings.model))
    # Not closed after an error: the others would report a closed connection in place of what went wrong here.
    dist.destroy_process_group()
