"""Replicas of torchft, each a process of its own, and what they should have learned."""

import os
import signal
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from comparing import copied, model_of_two_buckets
from torch import Tensor
from torch.nn.functional import mse_loss

import overlap
from harness import assert_parity, run_ranks
from overlap.hooks import Stage

STEPS = 8
FAULT_STEP = 3
COLLECTIVE_S, QUORUM_S, HEARTBEAT_S = 5.0, 20.0, 2.0
TIMEOUT_S = 60.0
"""For all steps of a replica: many times what torchft waits for one that is lost."""
FORMS: dict[str, Callable[[], Stage]] = {
    "AllReduce": overlap.AllReduce,
    "Cast": lambda: overlap.Cast(torch.bfloat16),
    "Quantize": lambda: overlap.Quantize(overlap.Int8(), error_feedback=True),
    "PowerSGD": lambda: overlap.PowerSGD(rank=1, wire=overlap.Int8()),
    "route": lambda: overlap.route({"*.weight": overlap.PowerSGD(rank=2), "*": overlap.AllReduce()}),
    "transforms": lambda: overlap.chain(overlap.AllReduce(), overlap.ClipGradNorm(0.1), overlap.SkipNonFinite()),
    "accumulated": overlap.AllReduce,
    "without Step": lambda: overlap.PowerSGD(rank=1),
}


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x[:, :4].sin()


def backward(ddp: Any, form: str, step: int, rank: int) -> None:
    if form == "accumulated":
        x, y = batch(step + STEPS, rank)
        with ddp.no_sync():
            mse_loss(ddp(x), y).backward()
    x, y = batch(step, rank)
    mse_loss(ddp(x), y).backward()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@contextmanager
def lighthouse(*, least: int) -> Iterator[str]:
    """The address of a server whose quorums have at ``least`` so many replicas."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="[::]:0", min_replicas=least, join_timeout_ms=10_000, heartbeat_timeout_ms=int(1000 * HEARTBEAT_S)
    )
    try:
        yield server.address().replace(socket.gethostname(), "localhost")
    finally:
        server.shutdown()


class Fault(Stage):
    """Before the reducer: in the second bucket of one step, once, the process is killed, or the stage ``"raises"``."""

    role = overlap.Role.TRANSFORM

    def __init__(self, manager: Any, kind: str) -> None:
        self._manager, self.kind = manager, kind

    async def __call__(self, bucket: overlap.Bucket) -> None:
        if (
            self.kind not in ("killed", "lost", "raises")
            or bucket.index != 1
            or self._manager.current_step() != FAULT_STEP
        ):
            return
        kind, self.kind = self.kind, ""
        if kind != "raises":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("a stage raised")


def manager_of(name: str, address: str, **options: Any) -> Any:
    """The Manager of the only process of a replica group."""
    from torchft import Manager, ProcessGroupGloo

    warnings.simplefilter("ignore")  # torchft's and PyTorch's of it.
    warnings.filterwarnings("error", module=r"overlap\b")
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    settings: dict[str, Any] = {
        "min_replica_size": 1,
        "use_async_quorum": False,
        "timeout": timedelta(seconds=COLLECTIVE_S),
        "quorum_timeout": timedelta(seconds=QUORUM_S),
        "rank": 0,
        "world_size": 1,
        "store_addr": "localhost",
        "store_port": store.port,
        "lighthouse_addr": address,
        "replica_id": name,
        "hostname": "localhost",
    }
    manager = Manager(ProcessGroupGloo(timedelta(seconds=COLLECTIVE_S)), None, None, **(settings | options))
    manager.store_of_group = store  # Its server ends with it.
    return manager


def replica(
    rank: int, world_size: int, name: str, address: str, form: str, kind: str, least: int, folder: str
) -> dict[str, Any]:
    """Train ``STEPS`` steps as the replica ``name``; returns its log and what it has learned."""
    from overlap.integrations.torchft import prepare

    manager = manager_of(name, address, min_replica_size=least)
    torch.manual_seed(ord(name[0]))
    model = model_of_two_buckets()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 if name == "a" else 2)  # The first quorum makes them the same.
    fault = Fault(manager, kind)
    ddp, optimizer = prepare(
        manager,
        model,
        optimizer_of(model),
        chain=[fault, FORMS[form]()]
        if form == "without Step"
        else lambda optimizer: overlap.chain(fault, FORMS[form](), overlap.Step(optimizer, deferred=True)),
        bucket_cap_mb=0.002,
    )
    stage = optimizer._registration.stage

    def state() -> Any:
        return copied([dict(model.named_parameters()), optimizer.optimizer.state_dict()["state"], stage.state_dict()])

    log, memory, began_s = [], {}, time.monotonic()
    Path(folder, f"{name}.there").touch()
    while not all(Path(folder, f"{other}.there").exists() for other in "ab"):
        time.sleep(0.05)
    time.sleep(0.3)  # Some heartbeats, so that the first quorum waits for both.
    while (step := manager.current_step()) < STEPS:
        if name == "a" and step == FAULT_STEP + 2:
            Path(folder, "a.passed").touch()
            while not Path(folder, "b.there").exists():
                time.sleep(0.05)
            time.sleep(0.3)
        optimizer.zero_grad()
        step, participants = manager.current_step(), manager.num_participants()
        before, raised = state(), ""
        memory[step] = before[2]
        try:
            backward(ddp, form, step, manager.participating_rank())
        except ArithmeticError as error:
            raised = str(error)
        if fault.kind == "reports" and step == FAULT_STEP:
            fault.kind = ""
            manager.report_error(RuntimeError("not this step"))
        optimizer.step()
        committed = manager.current_step() > step
        if not committed:
            assert_parity(state(), before, what=f"{name}, step {step}, which was not committed")
        log.append((step, participants, committed, raised))
    took_s = time.monotonic() - began_s
    manager.shutdown(wait=False)
    return {"log": log, "took_s": took_s, "model": copied(model.state_dict()), "state": state(), "memory": memory}


def start(pool: ThreadPoolExecutor, *arguments: Any) -> Future[Any]:
    """A replica in a process of its own, which is ended where it hangs."""
    return pool.submit(run_ranks, replica, 1, *arguments, backend=None, timeout_s=TIMEOUT_S, return_exceptions=True)


def join(started: Sequence[Future[Any]]) -> list[Any]:
    found = [one.result()[0] for one in started]
    for one in found:
        if isinstance(one, BaseException) and type(one).__name__ != "RankDied":
            raise one
    return found
