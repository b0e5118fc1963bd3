"""Starts ranks and has them run checks: one world of processes for many checks, a new one after a failure.

It needs torch alone, so that it runs where nothing else is installed.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.link import shared_gpu_env

from .check import Check, Outcome, Result

__all__ = ["Runner", "run_checks", "summary"]

_START_S = 120.0
# After the first failure, how long the other ranks have to report theirs.
_BLAME_S = 1.0
_DETAIL_CHARS = 4000
_PEER_GONE = ("Connection closed by peer", "Connection reset", "Broken pipe", "remote peer", "Timed out", "PeerError")
_EVERY_RANK = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    # Streams run beside each other as far as the hardware lets them, so that what is not ordered shows.
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    # The same algorithm of cuBLAS whichever stream it runs on, so that two runs are equal bit for bit.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def run_checks(
    checks: Iterable[Check],
    device: str,
    *,
    until_s: float | None = None,
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Runs each check on `device`, `"cpu"` or `"cuda"`, and returns what came of them, in the order they ran.

    `until_s`, of `time.monotonic()`, is when no further check is begun. `on_result` is called with each result as it
    comes.
    """
    results: list[Result] = []
    with Runner(device) as runner:
        for check in sorted(checks, key=lambda check: check.world):
            is_late = until_s is not None and time.monotonic() >= until_s
            results.append(_skipped(check, "the time was up") if is_late else runner.run(check))
            on_result(results[-1])
    return results


class Runner:
    """Runs one check after the other on `device`, in the same processes where it can.

    A check that fails, dies or hangs costs its own result and the time to start new processes.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._world: _World | None = None
        self._kind: object = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()

    def run(self, check: Check) -> Result:
        if self._device not in check.devices:
            return _skipped(check, f"it needs {' or '.join(check.devices)}")
        if self._device == "cuda" and not torch.cuda.is_available():
            return _skipped(check, "torch sees no GPU")
        start = time.monotonic()
        if self._world is None or self._kind != check.world:
            self._leave()
            self._world, self._kind = _World(check.ranks, self._device), check.world
        outcome, detail, figures = self._world.run(check)
        if outcome != "passed":
            self._leave()
        return _result(check, outcome, detail=detail, figures=figures, elapsed_s=time.monotonic() - start)

    def _leave(self) -> None:
        if self._world is not None:
            self._world.end()
        self._world = None


def _result(check: Check, outcome: Outcome, **fields: Any) -> Result:
    return Result(name=check.name, topic=check.topic, ranks=check.ranks, outcome=outcome, **fields)


def _skipped(check: Check, reason: str) -> Result:
    return _result(check, "skipped", detail=reason)


class _World:
    """Processes with a process group, which run one check after the other."""

    def __init__(self, ranks: int, device: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="overlap-checks-")
        context = _context()
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        # Nothing is ever sent: its end is read when this process is gone, however it went.
        alive, self._alive = context.Pipe(duplex=False)
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            log = Path(self._folder.name) / f"rank{rank}.log"
            args = (rank, ranks, device, str(Path(self._folder.name) / "store"), str(log), theirs, alive)
            process = context.Process(target=_rank_main, args=args, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        alive.close()
        self._is_started = False

    def run(self, check: Check) -> tuple[Outcome, str, dict[str, Any]]:
        """What came of it, why, and rank 0's figures."""
        if not self._is_started:
            self._is_started = True
            came, detail, _ = self._outcome(_START_S)
            if came != "passed":
                return came, f"while the ranks started: {detail}", {}
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(check)
        return self._outcome(check.timeout_s)

    def _outcome(self, timeout_s: float) -> tuple[Outcome, str, dict[str, Any]]:
        answers = self._collect(timeout_s)
        failed = {rank: answer for rank, answer in answers.items() if answer[0] != "passed"}
        if not failed:
            return "passed", "", answers[0][2]
        # A rank that only saw another one go, or waited for it, is not the cause.
        rank = min(failed, key=lambda rank: (_is_consequence(failed[rank]), rank))
        outcome, detail, _ = failed[rank]
        others = ", ".join(f"rank {other} {answers[other][0]}" for other in sorted(answers) if other != rank)
        path = Path(self._folder.name) / f"rank{rank}.log"
        log = path.read_text(errors="replace").strip() if path.exists() else ""
        detail = "\n".join(part for part in (f"rank {rank}: {detail}", f"({others})" if others else "", log) if part)
        return outcome, detail[-_DETAIL_CHARS:], {}

    def _collect(self, timeout_s: float) -> dict[int, tuple[Outcome, str, dict[str, Any]]]:
        answers: dict[int, tuple[Outcome, str, dict[str, Any]]] = {}
        deadline_s = time.monotonic() + timeout_s
        while missing := [rank for rank in range(len(self._connections)) if rank not in answers]:
            ready = wait([self._connections[rank] for rank in missing], timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                answers |= {rank: ("hung", f"no answer after {timeout_s:g} s", {}) for rank in missing}
            for rank in missing:
                if self._connections[rank] in ready:
                    answers[rank] = self._answer(rank)
                    if answers[rank][0] != "passed":
                        deadline_s = min(deadline_s, time.monotonic() + _BLAME_S)
        return answers

    def _answer(self, rank: int) -> tuple[Outcome, str, dict[str, Any]]:
        try:
            answer: tuple[Outcome, str, dict[str, Any]] = self._connections[rank].recv()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(5)
            return "died", f"exit code {self._processes[rank].exitcode}", {}
        return answer

    def end(self) -> None:
        """Ends the processes: at once, since after a failure they may be in a collective."""
        for process in self._processes:
            process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join(10)
            connection.close()
        self._processes, self._connections = [], []
        self._alive.close()
        self._folder.cleanup()


def _is_consequence(answer: tuple[Outcome, str, Any]) -> bool:
    return answer[0] == "hung" or any(words in answer[1] for words in _PEER_GONE)


def _context() -> Any:
    """A server that has imported torch once, and from which each rank is forked: it never touches a GPU itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "overlap", f"{__package__}.table"])
    # Python 3.11's fork server does not take over the parent's sys.path.
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in (str(Path.cwd()), *sys.path) if path))
    return context


def _rank_main(
    rank: int, ranks: int, device_type: str, store: str, log: str, connection: Connection, alive: Connection
) -> None:
    threading.Thread(target=_end_with_parent, args=(alive,), daemon=True).start()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(_EVERY_RANK)
    torch.set_num_threads(1)
    with _process_group(rank, ranks, device_type, store) as device:
        connection.send(("passed", "", {}))
        while True:
            try:
                check: Check = connection.recv()
            except EOFError:
                break
            connection.send(_played(check, rank, ranks, device))
            gc.collect()
    os._exit(0)


def _end_with_parent(alive: Connection) -> None:
    # The fork server, whose child this is, lives as long as its children.
    with contextlib.suppress(EOFError, OSError):
        alive.recv_bytes()
    os._exit(1)


def _played(check: Check, rank: int, ranks: int, device: torch.device) -> tuple[Outcome, str, dict[str, Any]]:
    try:
        figures = check.run(rank, ranks, device) or {}
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception:
        return "failed", traceback.format_exc(), {}
    return "passed", "", figures


@contextlib.contextmanager
def _process_group(rank: int, ranks: int, device_type: str, store: str) -> Iterator[torch.device]:
    import torch.distributed as dist

    device = torch.device("cpu")
    if device_type == "cuda":
        devices = torch.cuda.device_count()
        if ranks > devices:
            os.environ.update(shared_gpu_env(rank))
        device = torch.device("cuda", rank % devices)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo" if device.type == "cpu" else "nccl",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=30),
    )
    yield device


def summary(results: Sequence[Result]) -> str:
    """A line for each topic, and one for each check that did not pass."""
    lines = []
    for topic in dict.fromkeys(result.topic for result in results):
        ours = [result for result in results if result.topic == topic]
        counts = collections.Counter(result.outcome for result in ours)
        lines.append(f"{topic}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    bad = [result for result in results if result.outcome not in ("passed", "skipped")]
    lines += [f"\n{result.name} {result.outcome}: {result.detail}" for result in bad]
    return "\n".join(lines)
