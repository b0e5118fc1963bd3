"""Runs small training scripts on two ranks to their end, each in many ways, and counts the exit statuses.

`python tests/ends_of_scripts.py 50` runs each fifty times; names of ends may follow. Each rank is forked from this
process, which has imported everything, and ends as any interpreter does, by falling off the end of the script.
"""

import collections
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from overlap import (
    AllReduce,
    LocalSGD,
    OverlappedOptimizer,
    Registration,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)

_RAISED = 1
_LIMIT_S = 90.0
Loop = Callable[[int], None]


class _Training:
    """Four steps of ZeRO, gathered in forward unless told otherwise."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh())]
        self.ddp = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.25)
        self.zero = ZeroRedundancyOptimizer(self.ddp.parameters(), torch.optim.AdamW, lr=1e-3, overlap_with_ddp=True)
        self.registration = chain(ZeroStep(self.zero, **{"gather": "forward", **options})).register(self.ddp)
        for _ in range(4):
            self.backward()
            self.zero.step()

    def backward(self) -> None:
        self.ddp(torch.randn(4, 256)).square().mean().backward()


def _stepped(ddp: DistributedDataParallel) -> Registration:
    optimizer = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters()))
    registration = chain(AllReduce(), Step(optimizer)).register(ddp)
    for _ in range(4):
        ddp(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    return registration


def _leave_all(rank: int) -> None:
    """One kept by a cycle, the other by a name that is not the module's."""
    training: Any = _Training()
    training.itself = training
    _stepped(DistributedDataParallel(torch.nn.Linear(64, 64)))


def _destroy_and_wait(rank: int) -> None:
    training = _Training()
    dist.destroy_process_group()
    training.zero.wait()


def _raise_in_backward(rank: int) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    training = _Training()
    training.ddp.module[2].weight.register_hook(fail)
    training.backward()


def _destroy(rank: int) -> None:
    """With a chain that was removed, and an average in flight."""
    ddp = DistributedDataParallel(torch.nn.Linear(64, 64))
    _stepped(ddp).remove()
    for _ in range(4):
        ddp(torch.randn(4, 64)).square().mean().backward()
    ddp = DistributedDataParallel(torch.nn.Linear(512, 512))
    local = LocalSGD(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), period=2, start_step=0, overlap=True)
    for _ in range(4):
        local.zero_grad()
        ddp(torch.randn(4, 512)).square().mean().backward()
        local.step()
    assert local.averager.pending is not None
    dist.destroy_process_group()


ENDS: dict[str, tuple[Loop, int]] = {
    "nothing": (_leave_all, 0),
    "destroy_process_group": (_destroy, 0),
    "destroy_process_group, wait": (_destroy_and_wait, 0),
    "an exception in backward": (_raise_in_backward, _RAISED),
}


class _Rank(Exception):
    """Raised in a forked process, to leave the loop over ends."""


def _run(name: str) -> tuple[int, ...]:
    """The exit statuses of two ranks; raises `_Rank` in each of them."""
    # Not a file: without destroy_process_group() the end of a FileStore spins.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            raise _Rank(name, rank, address)
        pids.append(pid)
    return tuple(map(_status, pids))


def _status(pid: int) -> int:
    deadline_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline_s:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -signal.SIGKILL


def _count(times: int, names: list[str]) -> bool:
    is_clean = True
    for name in names:
        counts = collections.Counter(_run(name) for _ in range(times))
        expected = (ENDS[name][1],) * 2
        is_clean &= set(counts) == {expected}
        others = {statuses: count for statuses, count in counts.items() if statuses != expected}
        print(f"{name}: {counts[expected]} of {times}{f', else {others}' if others else ''}", flush=True)
    return is_clean


def _main() -> int:
    times, names = int(sys.argv[1]), sys.argv[2:] or list(ENDS)
    try:
        return 0 if _count(times, names) else 1
    except _Rank as forked:
        name, rank, address = forked.args
    # Outside of the except clause: an error in the loop is then the only one.
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 (until the interpreter is gone)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    ENDS[name][0](rank)
    return 0


if __name__ == "__main__":
    status = _main()
    if status:
        sys.exit(status)
