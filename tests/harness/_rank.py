"""The life of one rank's process: prepare, run the function, report, leave."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

UNKNOWN_BACKEND = "unknown"
"""Gloo under a name that the library does not know."""


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """All that a rank needs to start; it crosses to the process by pickling."""

    rank: int
    world_size: int
    backend: str | None
    group_timeout_s: float
    timeout_s: float
    folder: Path
    environ: dict[str, str]
    call: bytes  # cloudpickle of (fn, args)

    @property
    def own(self) -> Path:
        """For the files of the test; one for all ranks."""
        return self.folder / "own"

    @property
    def log(self) -> Path:
        return self.folder / f"rank{self.rank}.log"

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def stacks(self) -> Path:
        return self.folder / f"rank{self.rank}.stacks"


@dataclass(frozen=True)
class Report:
    """What a rank sends: first its result and at the end None, or an exception with its traceback."""

    value: Any
    exception: BaseException | None = None
    traceback: str = ""


def rank_main(spec: RankSpec, connection: Connection) -> None:
    """Runs in the rank's process and never returns: `os._exit` leaves even where a thread is stuck."""
    os.environ.clear()
    os.environ.update(spec.environ)  # the fork server's environment is that of its start
    os.environ["FOLDER_OF_TEST"] = str(spec.own)
    _redirect_output(spec.log)
    _watch(spec)
    coverage = _start_coverage()
    stray = _Stray()
    payload = _run(spec, connection, stray)
    # Coverage comes first: the parent may end this process as soon as a failure is reported.
    if coverage is not None:
        coverage.stop()
        coverage.save()
    with contextlib.suppress(OSError):
        connection.send_bytes(payload)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(spec: RankSpec, connection: Connection, stray: _Stray) -> bytes:
    try:
        _turn_warnings_into_errors()
        import torch

        torch.set_num_threads(1)
        from overlap.hooks.engine import executors

        fn, args = pickle.loads(spec.call)
        # The models of tests stand for large ones, unless a test (or whoever runs them all) asks for inline passes.
        executors.SMALL_BYTES = int(os.environ.get("OVERLAP_SMALL_MODEL_BYTES", "0"))
        with _process_group(spec):
            value = fn(spec.rank, spec.world_size, *args)
            # Plain pickle copies a tensor's bytes; multiprocessing's would share memory that is about to go.
            connection.send_bytes(pickle.dumps(Report(value)))
            connection.recv_bytes()  # a group left early breaks the collectives that peers are still in
        gc.collect()
        stray.check()
        return pickle.dumps(Report(None))
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        payload = pickle.dumps(Report(None, error, text))
        pickle.loads(payload)  # an exception whose __init__ takes other arguments than .args fails only here
    except Exception as why:
        stand_in = RuntimeError(f"{type(error).__qualname__}: {error} (does not pickle: {why!r})")
        return pickle.dumps(Report(None, stand_in, text))
    return payload


@contextlib.contextmanager
def _process_group(spec: RankSpec) -> Iterator[None]:
    if spec.backend is None:
        yield
        return
    import torch
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=spec.group_timeout_s)
    if "nccl" in spec.backend:
        devices = torch.cuda.device_count()
        if spec.world_size > devices:
            from benchmarks.link import shared_gpu_env

            os.environ.update(shared_gpu_env(spec.rank))
        torch.cuda.set_device(spec.rank % devices)
    if spec.backend == UNKNOWN_BACKEND:

        class Unknown(dist.ProcessGroupGloo):
            def name(self) -> str:
                return UNKNOWN_BACKEND

        made: list[Unknown] = []  # PyTorch keeps the C++ object alone, whose name is Gloo's.

        def make(*args: Any) -> Unknown:
            made.append(Unknown(*args))
            return made[-1]

        dist.Backend.register_backend(spec.backend, make, devices=["cpu"])
    # A TCPStore looks up the name of every peer, and waits five seconds where a name server is silent.
    store = dist.FileStore(str(spec.store), spec.world_size)
    store.set_timeout(timeout)
    dist.init_process_group(spec.backend, store=store, rank=spec.rank, world_size=spec.world_size, timeout=timeout)
    # Gloo's constructor returns while peers still connect; one that dies by then would fail theirs.
    ready = store.add("ranks that are ready", 1)
    while ready < spec.world_size:  # `store.wait()` looks every 10 ms.
        time.sleep(0.001)
        ready = store.add("ranks that are ready", 0)
    yield
    # Not in a `finally`: after an exception the peers may be inside a collective, and leaving is quicker.
    dist.destroy_process_group()


def _redirect_output(log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (lives as long as the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _watch(spec: RankSpec) -> None:
    """Dumps stacks on request and on a crash, and exits when the parent is gone; none of it needs the GIL."""
    stacks = spec.stacks.open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable(file=sys.stderr, all_threads=True)
    faulthandler.dump_traceback_later(spec.timeout_s + 10, exit=True, file=stacks)


def _turn_warnings_into_errors() -> None:
    warnings.resetwarnings()
    warnings.simplefilter("error")
    # Tests read the state of an optimizer to compare it.
    warnings.filterwarnings("ignore", message=".* is not in the state of the optimizer")


def _start_coverage() -> Any:
    # coverage's own start-up file runs in processes started by exec; a rank is forked and starts it here.
    if not {"COVERAGE_PROCESS_CONFIG", "COVERAGE_PROCESS_START"} & os.environ.keys():
        return None
    import coverage

    return coverage.process_startup(force=True)


class _Stray:
    """Exceptions that reached no caller: in a thread, in a destructor or in a callback."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []
        threading.excepthook = self._from_thread
        sys.unraisablehook = self._from_interpreter

    def _from_thread(self, args: threading.ExceptHookArgs) -> None:
        threading.__excepthook__(args)
        if args.exc_value is not None:
            self._errors.append(args.exc_value)

    def _from_interpreter(self, args: sys.UnraisableHookArgs) -> None:
        sys.__unraisablehook__(args)
        if args.exc_value is not None:
            self._errors.append(args.exc_value)

    def check(self) -> None:
        if self._errors:
            raise RuntimeError("an exception reached no caller (thread or destructor)") from self._errors[0]
