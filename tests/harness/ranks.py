"""Ranks as processes: a fresh world in about a tenth of a second, forked from one preloaded server."""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

try:
    import cloudpickle as pickling
except ImportError:  # `make gpu` needs torch alone, and has no closures.
    import pickle as pickling

from ._rank import RankSpec, Report, rank_main

# Peers of a rank that fails see their connections break; the cause may be reported this much later.
_BLAME_S = 0.5
_STACKS_S = 2.0
_LEAVE_S = 10.0
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


class WorldError(Exception):
    """A rank of a world failed; the message says which one and why, then what the others did."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class RankFailed(WorldError):
    """`fn` raised on a rank: `exception` is what it raised, the message holds that rank's traceback."""

    def __init__(self, rank: int, message: str, exception: BaseException) -> None:
        super().__init__(rank, message)
        self.exception = exception


class RankDied(WorldError):
    """A rank's process ended without a result: `exitcode` is negative for a signal, as in `subprocess`."""

    def __init__(self, rank: int, message: str, exitcode: int | None) -> None:
        super().__init__(rank, message)
        self.exitcode = exitcode


class RankHung(WorldError):
    """A rank had no result when the time was up; the message holds the stacks of its threads."""


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
    is raised: every rank is waited for, and the result of one that failed is its exception (`RankDied` for a
    death, `RankHung` for a hang).
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        shared = {
            "world_size": world_size,
            "backend": backend,
            "group_timeout_s": group_timeout_s,
            "timeout_s": timeout_s,
            "folder": Path(folder),
            "environ": dict(os.environ) | _EVERY_RANK | dict(env or {}),
            "call": pickling.dumps((fn, args)),
        }
        specs = [RankSpec(rank=rank, **shared) for rank in range(world_size)]
        specs[0].own.mkdir()
        world = [_Rank.start(spec) for spec in specs]
        deadline_s = time.monotonic() + timeout_s
        try:
            _collect(world, reports=1, deadline_s=deadline_s, until_failure=not return_exceptions)
            if return_exceptions or not any(rank.failure for rank in world):
                for rank in world:
                    rank.let_leave()
                deadline_s = max(deadline_s, time.monotonic() + _LEAVE_S)
                _collect(world, reports=2, deadline_s=deadline_s, until_failure=not return_exceptions)
        finally:
            _end(world)
        for rank in world:
            sys.stdout.write(rank.log())
    blamed = _blamed(world)
    if blamed is not None and not return_exceptions:
        raise _with_the_others(blamed, world) from getattr(blamed.failure, "exception", None)
    return [rank.outcome() for rank in world]


def on_ranks(*world_sizes: int, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test of `fn`, or one for each of several numbers of ranks, which `run_ranks` calls with these options. Of
    its arguments `rank`, `world_size` and `folder`, an empty one for all ranks, are the harness's, and the others the
    test's own."""

    def decorated(fn: Callable[..., Any]) -> Callable[..., None]:
        def test(**given: Any) -> None:
            others = {name: value for name, value in given.items() if name != "ranks"}
            run_ranks(_on_rank, given.get("ranks", world_sizes[0]), test, others, **options)

        # Not by `functools.wraps`, by which pytest would find the arguments of ranks.
        for name in functools.WRAPPER_ASSIGNMENTS:
            setattr(test, name, getattr(fn, name))
        parameters = [one for name, one in inspect.signature(fn).parameters.items() if name not in _OF_A_RANK]
        test.on_rank = fn  # type: ignore[attr-defined]
        if len(world_sizes) > 1:
            import pytest  # `make gpu` has none.

            pytest.mark.parametrize("ranks", world_sizes)(test)
            parameters.append(inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY))
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorated


def play(cells: Mapping[str, Callable[..., None]], *args: Any) -> None:
    """On a rank: calls each of ``cells``, and fails with the tracebacks of those that have failed."""
    failed = []
    for name, cell in cells.items():
        try:
            cell(*args)
        except Exception:
            failed.append(f"{name}: {traceback.format_exc()}")
    assert not failed, "\n\n".join(failed)


_OF_A_RANK = ("rank", "world_size", "folder")


def _on_rank(rank: int, world_size: int, test: Any, given: dict[str, Any]) -> None:
    there = given | {"rank": rank, "world_size": world_size, "folder": Path(os.environ["FOLDER_OF_TEST"])}
    test.on_rank(**{name: there[name] for name in inspect.signature(test.on_rank).parameters})


@dataclass(eq=False)
class _Rank:
    spec: RankSpec
    process: Any
    connection: Connection
    reports: list[Report] = field(default_factory=list)
    failure: WorldError | None = None
    failed_at_s: float = float("inf")

    @classmethod
    def start(cls, spec: RankSpec) -> _Rank:
        # CUDA does not survive a fork, even of a process that has only counted its GPUs.
        is_forked = "nccl" not in (spec.backend or "")
        if is_forked:
            start_server()
        context = multiprocessing.get_context("forkserver" if is_forked else "spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=rank_main, args=(spec, theirs), name=f"rank{spec.rank}", daemon=True)
        process.start()
        theirs.close()  # so that the rank's end is the only one, and its death reads as the end of the stream
        return cls(spec, process, ours)

    def outcome(self) -> Any:
        if isinstance(self.failure, RankFailed):
            self.failure.exception.add_note(f"[rank {self.spec.rank}] {self.reports[-1].traceback}")
            return self.failure.exception
        return self.failure or self.reports[0].value

    def let_leave(self) -> None:
        with contextlib.suppress(OSError):  # its death is read from the connection
            self.connection.send_bytes(b"")

    def receive(self) -> None:
        rank = self.spec.rank
        try:
            report = pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            code = self.process.exitcode
            how = "an unknown exit code" if code is None else f"exit code {code}{_signal_name(code)}"
            self.failure = RankDied(rank, f"rank {rank} died with {how}{self._log_section()}", code)
        else:
            self.reports.append(report)
            if report.exception is None:
                return
            text = f"rank {rank} raised\n\n{report.traceback.rstrip()}{self._log_section()}"
            self.failure = RankFailed(rank, text, report.exception)
        self.failed_at_s = time.monotonic()

    def hang(self) -> None:
        rank = self.spec.rank
        what = (
            "had a result, but did not leave its group"
            if self.reports
            else f"had no result after {self.spec.timeout_s:g} s"
        )
        self.failure = RankHung(rank, f"rank {rank} {what}{self._stacks_section()}{self._log_section()}")
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


def _collect(world: list[_Rank], *, reports: int, deadline_s: float, until_failure: bool) -> None:
    """Waits until each rank has sent so many reports, has failed or, at the deadline, counts as hung."""

    def pending() -> list[_Rank]:
        return [rank for rank in world if rank.failure is None and len(rank.reports) < reports]

    while waited_for := pending():
        left_s = deadline_s - time.monotonic()
        if until_failure and any(rank.failure for rank in world):
            left_s = min(rank.failed_at_s for rank in world) + _BLAME_S - time.monotonic()
            if left_s <= 0:
                return
        if left_s <= 0:
            break
        ready = wait([rank.connection for rank in waited_for], timeout=left_s)
        for rank in waited_for:
            if rank.connection in ready:
                rank.receive()
    hung = pending()
    for rank in hung:
        rank.ask_for_stacks()
    for rank in hung:
        rank.hang()


def _blamed(world: list[_Rank]) -> _Rank | None:
    """The rank that failed first, unless it only saw a peer go."""
    failed = sorted((rank for rank in world if rank.failure), key=lambda rank: rank.failed_at_s)
    return next((rank for rank in failed if not _saw_a_peer_go(rank)), failed[0] if failed else None)


def _saw_a_peer_go(rank: _Rank) -> bool:
    if not isinstance(rank.failure, RankFailed):
        return False
    return any(sign in rank.reports[-1].traceback for sign in _PEER_GONE)


def _with_the_others(blamed: _Rank, world: list[_Rank]) -> WorldError:
    error = blamed.failure
    assert error is not None
    hung = isinstance(error, RankHung)
    for rank in world:
        if rank is blamed:
            continue
        if rank.failure is None:
            said = f"rank {rank.spec.rank} " + ("had finished" if rank.reports else "was still running and was ended")
        else:
            said = str(rank.failure) if hung else f"rank {rank.spec.rank}: {_last_line(rank)}"
        error.args = (f"{error.args[0]}\n\n{said}",)
    return error


def _last_line(rank: _Rank) -> str:
    if isinstance(rank.failure, RankFailed):
        return rank.reports[-1].traceback.strip().splitlines()[-1]
    return str(rank.failure).splitlines()[0]


def _end(world: list[_Rank]) -> None:
    for rank in world:
        if rank.failure or len(rank.reports) < 2:
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
    """Starts the fork server, once per session, with the environment that its imports need."""
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


@contextlib.contextmanager
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
