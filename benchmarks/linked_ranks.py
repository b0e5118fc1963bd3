"""Runs a script of this folder once per rank, on links of a known speed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from overlap.bench.link import LinkError, ShapedLink, parse_bandwidth


def run(script: str, task: dict[str, Any], *, ranks: int, bandwidth: str | None, timeout_s: float) -> Any:
    """Calls `python script --rank-task FILE` once per rank, which answers by `answer`; returns what rank 0 answers.

    With a `bandwidth` each rank is in a network namespace of its own, which takes root; `None` is loopback.
    """
    with tempfile.TemporaryDirectory(prefix="overlap-ranks-") as folder, ExitStack() as stack:
        path = Path(folder) / "task.json"
        path.write_text(json.dumps({**task, "folder": folder}))
        link = None
        if bandwidth is not None:
            speed = parse_bandwidth(bandwidth)
            link = stack.enter_context(ShapedLink(ranks=ranks, bandwidth_bytes_per_s=speed))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        processes = []
        for rank in range(ranks):
            variables = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"} if link is None else link.env(rank)
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": str(rank), "WORLD_SIZE": str(ranks)}
            command = [sys.executable, script, "--rank-task", str(path)]
            processes.append(
                subprocess.Popen(
                    [*([] if link is None else link.prefix(rank)), *command],
                    env={**environment, "MASTER_PORT": str(port), **variables},
                    start_new_session=True,
                )
            )
        try:
            deadline_s = time.monotonic() + timeout_s
            while any(process.poll() is None for process in processes):
                if any(process.poll() not in (None, 0) for process in processes) or time.monotonic() > deadline_s:
                    raise RuntimeError(f"ranks ended with {[process.poll() for process in processes]}: {task}")
                time.sleep(0.05)
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return json.loads((Path(folder) / "answer.json").read_text())


def answer(task: dict[str, Any], value: Any) -> None:
    """What `run` returns; called on rank 0."""
    (Path(task["folder"]) / "answer.json").write_text(json.dumps(value))


__all__ = ["LinkError", "answer", "run"]
