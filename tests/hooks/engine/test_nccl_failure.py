"""On GPUs with NCCL: a failure on one rank reaches the others, and the communicators of the stages' own are given back.

Two ranks on one GPU do.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks
from harness.models import MLP
from overlap import AllReduce, Bucket, OverlappedOptimizer, PeerError, Stage, Step, chain

pytestmark = pytest.mark.gpu

# NCCL refuses two ranks on one GPU unless it takes them for ranks of two hosts, as the harness has it do.
SHARED_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}
STEPS, FAILING = 12, 6
TOLD_S = 10.0


class Flaky(Stage):
    """The all-reduce, which raises in bucket 1 of one step."""

    def __init__(self, step: int) -> None:
        self.inner, self.step = AllReduce(), step

    async def __call__(self, bucket: Bucket) -> None:
        if (bucket.step, bucket.index) == (self.step, 1):
            raise ValueError("the dog ate it")
        await self.inner(bucket)


def _env(world_size: int) -> dict[str, str]:
    return SHARED_GPU if torch.cuda.device_count() < world_size else {}


def _model(rank: int) -> tuple[DistributedDataParallel, torch.device]:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    ddp = DistributedDataParallel(MLP.model().to(device), device_ids=[device.index], **MLP.ddp_options())
    return ddp, device


def _step(ddp: Any, optimizer: OverlappedOptimizer, step: int, rank: int, device: torch.device) -> float:
    loss = ddp(*(x.to(device) for x in MLP.batch(step, rank).inputs)).square().sum()
    loss.backward()
    optimizer.step()
    return float(loss)  # The host waits for the device, as loops that log do.


def _train_until_told(
    ddp: Any, optimizer: OverlappedOptimizer, rank: int, device: torch.device, *, logs: bool, at: list[float]
) -> None:
    """Appends the time at which the step begins in which rank 0 fails; a host that runs ahead gets further."""
    for step in range(STEPS if logs else 1000):
        if step == FAILING:
            at.append(time.monotonic())
        if logs:
            _step(ddp, optimizer, step, rank, device)
        else:
            ddp(*(x.to(device) for x in MLP.batch(step % 8, rank).inputs)).square().sum().backward()
            optimizer.step()


def _raises_on_one_rank(rank: int, world_size: int, logs: bool) -> None:
    ddp, device = _model(rank)
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=1e-3))
    registered = chain(Flaky(FAILING if rank == 0 else -1), Step(optimizer)).register(ddp)
    at: list[float] = []
    with pytest.raises(ValueError if rank == 0 else PeerError, match="the dog ate it") as caught:
        _train_until_told(ddp, optimizer, rank, device, logs=logs, at=at)
    assert time.monotonic() - at[0] < TOLD_S
    if rank != 0:
        assert "rank 0" in str(caught.value)
    torch.cuda.synchronize()  # Nothing that is in flight waits for a rank that has failed.
    # Ranks agree on where to go on, as after loading a checkpoint.
    for parameter in ddp.parameters():
        torch.distributed.broadcast(parameter.data, 0)
    for step in range(4):
        _step(ddp, optimizer, step, rank, device)
    sums = torch.stack([parameter.double().sum() for parameter in ddp.parameters()])
    theirs = sums.clone()
    torch.distributed.broadcast(theirs, 0)
    assert torch.equal(sums, theirs)
    registered.remove()
    deadline_s = time.monotonic() + 20
    while any(thread.name.startswith("overlap-") for thread in threading.enumerate()):
        assert time.monotonic() < deadline_s, "the communicators were not given back"
        time.sleep(0.05)


@pytest.mark.parametrize("logs", [True, False], ids=["the host waits every step", "the host runs ahead"])
def test_a_failure_on_one_rank_is_told_and_training_goes_on(logs: bool) -> None:
    run_ranks(_raises_on_one_rank, 2, logs, backend="nccl", env=_env(2), timeout_s=170, group_timeout_s=60)
