"""Ranks as processes: a fresh world in about a tenth of a second, forked from one preloaded server."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle
import torch.distributed as dist

from ._rank import RankSpec, Report, rank_main
from .errors import RankDied, RankFailed, RankHung, WorldError

# Peers of a rank that fails see their connections break an instant later; this long we look for the cause.
_BLAME_S = 0.5
_STACKS_S = 2.0
_LOG_TAIL_CHARS = 4000
_PEER_GONE = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote peer",
    "Timed out",
)

_EVERY_RANK = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60,
    group_timeout_s: float = 20,
    backend: str | None = "gloo",
    env: Mapping[str, str] | None = None,
    return_exceptions: bool = False,
) -> list[Any]:
    """Calls `fn(rank, world_size, *args)` in `world_size` new processes and returns the results by rank.

    Each process has one thread for torch, warnings as errors and, unless `backend` is None, a default group
    whose collectives give up after `group_timeout_s`. Results and exceptions cross by pickling; return CPU
    tensors. `env` is added to the environment before `fn` is loaded: too late for what torch reads at import.

    Raises `RankFailed`, `RankDied` or `RankHung`, each a `WorldError` with `.rank`, as soon as one rank
    raises or dies, or when `timeout_s` is over; the other ranks are ended. With `return_exceptions` nothing
    is raised: every rank is waited for, and its exception (for a death `RankDied`, for a hang `RankHung`)
    stands in its place.
    """
    start_server()
    # The store lives here so that no rank's death takes it away; port 0 lets the system choose a free one.
    store = None
    if backend is not None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        shared = {
            "world_size": world_size,
            "backend": backend,
            "port": 0 if store is None else store.port,
            "group_timeout_s": group_timeout_s,
            "timeout_s": timeout_s,
            "folder": Path(folder),
            "environ": dict(os.environ) | _EVERY_RANK | dict(env or {}),
            "call": cloudpickle.dumps((fn, args)),
        }
        world = [_Rank.start(RankSpec(rank=rank, **shared)) for rank in range(world_size)]
        try:
            _collect(world, timeout_s=timeout_s, until_failure=not return_exceptions)
            outcomes = [rank.outcome() for rank in world]
        finally:
            _end(world)
        for rank in world:
            sys.stdout.write(rank.log())
    if return_exceptions:
        for rank in world:
            rank.note_traceback()
        return outcomes
    blamed = _blamed(world)
    if blamed is not None:
        raise _with_the_others(blamed, world) from getattr(blamed.failure, "exception", None)
    return outcomes


@dataclass(eq=False)
class _Rank:
    spec: RankSpec
    process: Any
    connection: Connection
    report: Report | None = None
    failure: WorldError | None = None
    failed_at_s: float = float("inf")

    @classmethod
    def start(cls, spec: RankSpec) -> _Rank:
        context = multiprocessing.get_context("forkserver")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=rank_main, args=(spec, sender), name=f"rank{spec.rank}", daemon=True)
        process.start()
        sender.close()  # so that the rank's end is the only one, and its death reads as the end of the stream
        return cls(spec, process, receiver)

    @property
    def pending(self) -> bool:
        return self.report is None and self.failure is None

    def outcome(self) -> Any:
        if self.report is not None and self.report.exception is None:
            return self.report.value
        if self.report is not None:
            return self.report.exception
        return self.failure

    def note_traceback(self) -> None:
        if self.report is not None and self.report.exception is not None:
            self.report.exception.add_note(f"[rank {self.spec.rank}] {self.report.traceback}")

    def receive(self) -> None:
        rank = self.spec.rank
        try:
            self.report = pickle.loads(self.connection.recv_bytes())
        except EOFError:
            self.process.join(5)
            code = self.process.exitcode
            how = "an unknown exit code" if code is None else f"exit code {code}{_signal_name(code)}"
            self.failure = RankDied(rank, f"rank {rank} died with {how}{self._log_section()}", code)
        if self.report is not None and self.report.exception is not None:
            text = f"rank {rank} raised\n\n{self.report.traceback.rstrip()}{self._log_section()}"
            self.failure = RankFailed(rank, text, self.report.exception)
        if self.failure is not None:
            self.failed_at_s = time.monotonic()

    def hang(self, timeout_s: float) -> None:
        rank = self.spec.rank
        text = f"rank {rank} had no result after {timeout_s:g} s{self._stacks_section()}{self._log_section()}"
        self.failure = RankHung(rank, text)
        self.failed_at_s = time.monotonic()

    def ask_for_stacks(self) -> None:
        # Until the rank has opened its file it has no handler, and the signal would end it.
        if self.process.exitcode is None and self.spec.stacks.exists():
            os.kill(self.process.pid, signal.SIGUSR1)

    def log(self) -> str:
        return self.spec.log.read_text(errors="replace") if self.spec.log.exists() else ""

    def _log_section(self) -> str:
        tail = self.log()[-_LOG_TAIL_CHARS:].strip()
        return f"\n\n--- output of rank {self.spec.rank} ---\n{tail}" if tail else ""

    def _stacks_section(self) -> str:
        deadline = time.monotonic() + _STACKS_S
        stacks = ""
        while time.monotonic() < deadline:
            before, stacks = stacks, self.spec.stacks.read_text() if self.spec.stacks.exists() else ""
            if stacks and stacks == before:
                break
            time.sleep(0.05)
        return f"\n\n--- stacks of rank {self.spec.rank} ---\n{stacks.strip() or '(none came)'}"


def _collect(world: list[_Rank], *, timeout_s: float, until_failure: bool) -> None:
    deadline = time.monotonic() + timeout_s
    while pending := [rank for rank in world if rank.pending]:
        left_s = deadline - time.monotonic()
        if until_failure and any(rank.failure for rank in world):
            left_s = min(rank.failed_at_s for rank in world) + _BLAME_S - time.monotonic()
            if left_s <= 0:
                return
        ready = wait([rank.connection for rank in pending], timeout=max(left_s, 0))
        for rank in pending:
            if rank.connection in ready:
                rank.receive()
        if not ready and time.monotonic() >= deadline:
            break
    hung = [rank for rank in world if rank.pending]
    for rank in hung:
        rank.ask_for_stacks()
    for rank in hung:
        rank.hang(timeout_s)


def _blamed(world: list[_Rank]) -> _Rank | None:
    """The rank that failed first, unless it only saw a peer go."""
    failed = sorted((rank for rank in world if rank.failure), key=lambda rank: rank.failed_at_s)
    return next((rank for rank in failed if not _saw_a_peer_go(rank)), failed[0] if failed else None)


def _saw_a_peer_go(rank: _Rank) -> bool:
    if not isinstance(rank.failure, RankFailed):
        return False
    return rank.report is not None and any(sign in rank.report.traceback for sign in _PEER_GONE)


def _with_the_others(blamed: _Rank, world: list[_Rank]) -> WorldError:
    error = blamed.failure
    assert error is not None
    hung = isinstance(error, RankHung)
    for rank in world:
        if rank is blamed:
            continue
        if rank.failure is None:
            said = f"rank {rank.spec.rank} " + ("was ended with it" if rank.report is None else "was done")
        else:
            said = str(rank.failure) if hung else f"rank {rank.spec.rank}: {_last_line(rank)}"
        error.args = (f"{error.args[0]}\n\n{said}",)
    return error


def _last_line(rank: _Rank) -> str:
    if rank.report is not None:
        return rank.report.traceback.strip().splitlines()[-1]
    return str(rank.failure).splitlines()[0]


def _end(world: list[_Rank]) -> None:
    for rank in world:
        if rank.pending or rank.failure:
            rank.process.kill()
    for rank in world:
        rank.process.join(10)
        if rank.process.exitcode is None:  # reported, yet stuck on its way out
            rank.process.kill()
            rank.process.join(10)
        rank.connection.close()
        rank.process.close()


def _signal_name(code: int) -> str:
    return f" ({signal.Signals(-code).name})" if code < 0 else ""


def start_server() -> None:
    """Starts the fork server, once a session, with what it has to see at import."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([f"{__package__}._preload"])
    with _environment(
        {
            **_EVERY_RANK,
            # Python 3.11's fork server ignores the parent's sys.path.
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            # Each rank starts its own measurement; one in the server would only slow its imports.
            "COVERAGE_PROCESS_CONFIG": None,
            "COVERAGE_PROCESS_START": None,
        }
    ):
        forkserver.ensure_running()


@contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    _apply(changes)
    try:
        yield
    finally:
        _apply(before)


def _apply(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
