"""One process per rank of the same program, on this machine.

`run_ranks` starts them and watches over them, `under_launcher` tells a rank that it is one, and `init_ranks`
makes the process group inside it. `torchrun` can start the ranks instead: the environment is the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import IO, TYPE_CHECKING

from overlap.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

__all__ = ["World", "choose_device", "init_ranks", "launched_ranks", "run_ranks", "shared_gpu_env", "under_launcher"]

_POLL_S = 0.02
_GRACE_S = 5.0
_TAIL_BYTES = 8192
_TIMED_OUT = 124  # what timeout(1) returns


def under_launcher() -> bool:
    """True in a process that is one of several ranks, started by `run_ranks`, `torchrun` or the like."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_ranks(asked: int | None) -> int | None:
    """How many ranks a launcher has started; None in a process that is not one of them.

    Raises:
        ConfigurationError: the command line asked for another number.
    """
    if not under_launcher():
        return None
    ranks = int(os.environ["WORLD_SIZE"])
    if asked not in (None, ranks):
        raise ConfigurationError(f"--ranks is {asked}, but the launcher started {ranks}: leave it out")
    return ranks


def run_ranks(
    argv: Sequence[str],
    ranks: int,
    *,
    prefix: Callable[[int], Sequence[str]] | None = None,
    env: Callable[[int], Mapping[str, str]] | None = None,
    timeout_s: float | None = None,
) -> int:
    """Runs `python -m overlap *argv` once per rank and returns when all have ended.

    Rank 0 writes to this process's own stdout and stderr. What the others write is kept, and its tail is shown
    if one of them fails. When a rank fails, the time is up, or this process gets SIGINT, SIGTERM or SIGHUP, every
    other rank is terminated, and killed if it has not gone after five seconds.

    Args:
        argv: the arguments after `python -m overlap`, the same for every rank.
        ranks: how many processes.
        prefix: words to put before the command of a rank, such as `["ip", "netns", "exec", name]`.
        env: variables to add for a rank; they win over all others, so that a rank in a network of its own can
            be given another `MASTER_ADDR`.
        timeout_s: how long all of it may take.

    Returns:
        0, or the exit code of the first rank that failed (128 + n for one that died by signal n), 124 when the
        time was up, and 130, 143 or 129 after SIGINT, SIGTERM or SIGHUP.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}: give at least 1")
    port = _free_port()
    running: list[_Rank] = []
    with contextlib.ExitStack() as cleanup:
        signalled = cleanup.enter_context(_signals())
        cleanup.callback(_stop, running)
        for rank in range(ranks):
            command = [*(prefix(rank) if prefix else ()), sys.executable, "-m", "overlap", *argv]
            variables = {**_environment(rank, ranks, port), **(env(rank) if env else {})}
            output = cleanup.enter_context(tempfile.TemporaryFile()) if rank else None
            running.append(_start(rank, command, variables, output))
        return _watch(running, signalled, None if timeout_s is None else time.monotonic() + timeout_s)


@dataclass(frozen=True)
class World:
    """What a rank needs to know about itself."""

    rank: int
    size: int
    device: torch.device
    backend: str

    @property
    def is_main(self) -> bool:
        """True on the rank that prints and writes files."""
        return self.rank == 0


@contextlib.contextmanager
def init_ranks(device: str = "auto", *, timeout_s: float = 600.0) -> Iterator[World]:
    """Joins the default process group for the length of a `with` block: of NCCL on CUDA, of Gloo on the CPU.

    Args:
        device: `"cpu"`, `"cuda"`, or `"auto"`: CUDA where every rank of this machine can have a GPU of its own.
            With `"cuda"` and fewer GPUs than ranks, ranks share them.
        timeout_s: how long a collective may wait for the other ranks.

    Raises:
        RuntimeError: this process was not started as a rank, or CUDA was asked for and there is none.
    """
    if not under_launcher():
        raise RuntimeError("RANK and WORLD_SIZE are not set: start the ranks with run_ranks or torchrun")
    import torch
    import torch.distributed as dist

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    chosen = choose_device(device, local_rank=local_rank, local_ranks=local_ranks)
    on_cuda = chosen.type == "cuda"
    backend = "nccl" if on_cuda else "gloo"
    if on_cuda:
        torch.cuda.set_device(chosen)
        if local_ranks > torch.cuda.device_count():
            for name, value in shared_gpu_env(local_rank).items():
                os.environ.setdefault(name, value)
    limit = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, timeout=limit, device_id=chosen if on_cuda else None)
    yield World(dist.get_rank(), dist.get_world_size(), chosen, backend)
    # Not closed after an exception: closing its connections would make the other ranks fail with "connection
    # closed" before this one has shown its traceback, and the process ends in any case.
    dist.destroy_process_group()


def choose_device(device: str, *, local_rank: int, local_ranks: int) -> torch.device:
    """The device of a rank; see `init_ranks` for what may be asked for."""
    import torch

    gpus = torch.cuda.device_count()
    if device == "auto":
        device = "cuda" if gpus >= local_ranks else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if device != "cuda":
        raise ValueError(f"device is {device!r}: give 'auto', 'cpu' or 'cuda'")
    if gpus == 0:
        raise RuntimeError("device is 'cuda' but torch sees no GPU: give 'cpu'")
    return torch.device("cuda", local_rank % gpus)


def shared_gpu_env(rank: int, *, interface: str = "lo") -> dict[str, str]:
    """Variables that keep NCCL's ranks to sockets over `interface`, so that several can share one GPU.

    They must be set in a rank before it makes its first NCCL communicator.
    """
    return {
        # NCCL refuses two ranks on one GPU by comparing host and bus: each seems to be on a host of its own.
        "NCCL_HOSTID": f"overlap-rank-{rank}",
        # Between hosts NCCL takes the best network that it finds, a cluster's plugin or InfiniBand included.
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": interface,
        # What could still see that it is one host: memory of the GPU, of the machine, or of an NVLink domain.
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
    }


@dataclass(frozen=True)
class _Rank:
    rank: int
    process: subprocess.Popen[bytes]
    output: IO[bytes] | None  # None: inherited, so the user has seen it


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    return {
        # Ranks share the cores: with the default of one thread per core each, they would compete for them.
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _start(rank: int, command: list[str], variables: dict[str, str], output: IO[bytes] | None) -> _Rank:
    process = subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        # A group of its own: a Ctrl-C in the terminal reaches this process alone, which then stops every rank
        # together with what that rank has started.
        start_new_session=True,
    )
    return _Rank(rank, process, output)


def _watch(running: Sequence[_Rank], signalled: Sequence[int], deadline: float | None) -> int:
    waiting = list(running)
    while waiting:
        if signalled:
            _say(f"stopped by {signal.Signals(signalled[0]).name}")
            return 128 + signalled[0]
        if deadline is not None and time.monotonic() > deadline:
            _say(f"out of time; still running: {', '.join(f'rank {one.rank}' for one in waiting)}")
            for one in waiting:
                _show_output(one)
            return _TIMED_OUT
        ended = [one for one in waiting if one.process.poll() is not None]
        failed = [one for one in ended if one.process.returncode != 0]
        for one in failed:
            _say(f"rank {one.rank} {_how_it_ended(one.process.returncode)}")
            _show_output(one)
        if failed:
            return _exit_code(failed[0].process.returncode)
        waiting = [one for one in waiting if one not in ended]
        time.sleep(_POLL_S)
    return 0


def _stop(running: Sequence[_Rank]) -> None:
    alive = [one.process for one in running if one.process.poll() is None]
    for process in alive:
        _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    for process in alive:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for one in running:
        # Also where the rank itself has gone: what it started may not have.
        _signal_group(one.process, signal.SIGKILL)
        one.process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the signals that ask this process to end in a list, in the order they come."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python lets only the main thread set handlers.
        return

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup has it ignored.
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _show_output(one: _Rank) -> None:
    if one.output is None:
        return
    size_bytes = one.output.seek(0, os.SEEK_END)
    one.output.seek(max(0, size_bytes - _TAIL_BYTES))
    text = one.output.read().decode(errors="replace").rstrip()
    if text:
        _say(f"last output of rank {one.rank}:\n{text}")


def _exit_code(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


def _how_it_ended(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with code {returncode}"
    return f"died by {signal.Signals(-returncode).name}"


def _say(text: str) -> None:
    print(f"overlap: {text}", file=sys.stderr, flush=True)
