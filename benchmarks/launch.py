"""Starts a module of this folder once per rank, on this machine, each in a network of its own where asked."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

__all__ = ["run_ranks"]

_POLL_S = 0.02
_GRACE_S = 5.0
_TAIL_BYTES = 8192
_TIMED_OUT = 124  # what timeout(1) returns


def run_ranks(
    argv: Sequence[str],
    ranks: int,
    *,
    prefix: Callable[[int], Sequence[str]] | None = None,
    env: Callable[[int], Mapping[str, str]] | None = None,
    timeout_s: float | None = None,
) -> int:
    """Runs `python -m *argv` once per rank and returns when all have ended.

    Rank 0 writes to this process's own stdout and stderr. The output of the others is kept, and its tail is shown if
    one of them fails. When a rank fails, the time is up, or this process is interrupted, every other rank is
    terminated, and killed if it has not gone after five seconds.

    Args:
        argv: the module and its arguments, the same for every rank.
        ranks: how many processes.
        prefix: words to put before the command of a rank, such as `["ip", "netns", "exec", name]`.
        env: variables to add for a rank; they win over all others, so that a rank in a network of its own can
            be given another `MASTER_ADDR`.
        timeout_s: how long all of it may take.

    Returns:
        0, or the exit code of the first rank that failed (128 + n for one that died by signal n), or 124 when the time
        was up.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    processes: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(_stop, processes)
        outputs = []
        for rank in range(ranks):
            variables = {
                # Ranks share the cores: with the default of one thread per core each, they would compete for them.
                "OMP_NUM_THREADS": "1",
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **(env(rank) if env else {}),
            }
            output = cleanup.enter_context(tempfile.TemporaryFile()) if rank else None
            command = [*(prefix(rank) if prefix else ()), sys.executable, "-m", *argv]
            # A group of its own: Ctrl-C reaches this process alone, which then stops each rank with its children.
            processes.append(
                subprocess.Popen(
                    command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    start_new_session=True,
                )
            )  # fmt: skip
            outputs.append(output)
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll()]
            if failed:
                break
            if deadline is not None and time.monotonic() > deadline:
                print("out of time; the ranks are stopped", file=sys.stderr, flush=True)
                for rank, output in enumerate(outputs):
                    _show(rank, output)
                return _TIMED_OUT
            time.sleep(_POLL_S)
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        for rank in failed:
            print(f"rank {rank} ended with {processes[rank].returncode}", file=sys.stderr, flush=True)
            _show(rank, outputs[rank])
        code = processes[failed[0]].returncode if failed else 0
        return 128 - code if code < 0 else code


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        # Also where the rank itself has gone: its children may not have.
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _show(rank: int, output: IO[bytes] | None) -> None:
    """The end of a rank's output; rank 0's was seen."""
    if output is not None:
        output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
        text = output.read().decode(errors="replace").rstrip()
        print(f"last output of rank {rank}:\n{text}", file=sys.stderr, flush=True)
