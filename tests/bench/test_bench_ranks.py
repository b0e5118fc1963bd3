"""What runs inside the ranks: byte counters, the simulated link, and children that may do anything."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks
from overlap.bench.collectives import COUNTED_BACKEND, counted_bytes, register_counted_backend, sent_bytes
from overlap.bench.job import Outcome, common_cause
from overlap.bench.simulated import SIMULATED_BACKEND, LinkSpeed, LoneStore, register_simulated_backend
from overlap.bench.wire import socket_bytes
from overlap.bench.workload import workload

_NUMEL = 400_000


@pytest.mark.parametrize("ranks", [2, 4])
def test_sockets_and_collectives_count_the_same_all_reduce(ranks: int, tmp_path: Path) -> None:
    def count(rank: int, world_size: int, folder: str) -> tuple[float, float]:
        register_counted_backend(dist.ProcessGroupGloo)
        store = dist.FileStore(f"{folder}/store", world_size)
        dist.init_process_group(COUNTED_BACKEND, store=store, rank=rank, world_size=world_size)
        tensor = torch.ones(_NUMEL)
        dist.all_reduce(tensor)
        dist.barrier()
        before = socket_bytes(), counted_bytes()
        for _ in range(2):
            dist.all_reduce(tensor.fill_(1.0))
        # Only when all have received is all of it sent; a barrier sends a few bytes itself.
        dist.barrier()
        sent = (socket_bytes() - before[0]) / 2, (counted_bytes() - before[1]) / 2
        assert torch.equal(tensor, torch.full((_NUMEL,), float(world_size)))
        dist.destroy_process_group()
        return sent

    results = run_ranks(count, ranks, str(tmp_path), backend=None)
    expected = 2 * 4 * _NUMEL * (ranks - 1) / ranks
    for on_sockets, at_collectives in results:
        assert on_sockets == pytest.approx(expected, rel=0.02)
        assert at_collectives == expected


def test_volumes_of_the_other_collectives() -> None:
    assert sent_bytes("all_gather", 400, 4) == sent_bytes("reduce_scatter", 400, 4) == 300
    assert sent_bytes("all_reduce", 400, 4) == 600
    assert sent_bytes("send", 400, 4) == 400
    assert sent_bytes("barrier", 400, 4) == 0


# The simulated link -----------------------------------------------------------------------------------------


def simulate(rank: int, ranks: int, bandwidth_bytes_per_s: float) -> None:
    register_simulated_backend(LinkSpeed(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=0.0))
    dist.init_process_group(SIMULATED_BACKEND, store=LoneStore(ranks), rank=0, world_size=ranks)


def test_a_simulated_ddp_has_the_gradients_of_equal_ranks_and_takes_its_time() -> None:
    def train(rank: int, world_size: int) -> dict[str, Any]:
        simulate(rank, 4, 4e6)
        torch.manual_seed(0)
        model, inputs = nn.Linear(200, 100), torch.randn(3, 200)
        model(inputs).sum().backward()
        expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        ddp = DistributedDataParallel(model, process_group=dist.new_group())
        before, start = counted_bytes(), time.perf_counter()
        ddp(inputs).sum().backward()
        elapsed_s = time.perf_counter() - start
        same = all(
            torch.allclose(parameter.grad, gradient)
            for parameter, gradient in zip(model.parameters(), expected, strict=True)
            if parameter.grad is not None
        )
        return {"same": same, "sent": counted_bytes() - before, "elapsed_s": elapsed_s}

    (seen,) = run_ranks(train, 1, backend=None)
    volume = 1.5 * 4 * (200 * 100 + 100)
    assert seen["same"] and seen["sent"] == volume
    assert seen["elapsed_s"] > volume / 4e6


def test_simulated_collectives_act_as_if_all_ranks_were_equal() -> None:
    def collect(rank: int, world_size: int) -> list[Any]:
        simulate(rank, 3, 1e9)
        # Renamed in PyTorch 2.13, where the older names warn.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        mine = torch.tensor([1.0, 2.0, 3.0])
        gathered, listed, scattered = torch.zeros(9), [torch.zeros(3) for _ in range(3)], torch.zeros(1)
        averaged, largest = mine.clone(), mine.clone()
        gather(gathered, mine)
        dist.all_gather(listed, mine)
        reduce_scatter(scattered, mine)
        dist.all_reduce(averaged, op=dist.ReduceOp.AVG)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        dist.broadcast(mine, src=2)
        with pytest.raises(NotImplementedError, match="a simulated link has no alltoall_base"):
            dist.all_to_all_single(torch.zeros(3), mine)
        with pytest.raises(NotImplementedError, match="knows SUM, AVG, MIN and MAX"):
            dist.all_reduce(mine, op=dist.ReduceOp.PRODUCT)
        return [gathered, *listed, scattered, averaged, largest]

    (seen,) = run_ranks(collect, 1, backend=None)
    mine = torch.tensor([1.0, 2.0, 3.0])
    expected = [mine.repeat(3), mine, mine, mine, torch.tensor([3.0]), mine, mine]
    assert all(torch.equal(got, want) for got, want in zip(seen, expected, strict=True))


@pytest.mark.gpu
def test_a_simulated_link_on_a_gpu_costs_its_time_beside_the_computation() -> None:
    def train(rank: int, world_size: int) -> dict[str, float]:
        simulate(rank, 2, 1e9)
        tensor = torch.ones(5_000_000, device="cuda")
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        start = time.perf_counter()
        work = dist.all_reduce(tensor.fill_(1.0), async_op=True)
        launched_s = time.perf_counter() - start
        assert work is not None
        work.wait()
        total = float(tensor.sum())
        return {"launched_s": launched_s, "elapsed_s": time.perf_counter() - start, "total": total}

    (seen,) = run_ranks(train, 1, backend=None)
    # 20 MB at 1 GB/s; the host only launches.
    assert seen["total"] == 10_000_000
    assert seen["launched_s"] < 0.01
    assert seen["elapsed_s"] == pytest.approx(0.020, rel=0.15)


@pytest.mark.parametrize(("field", "speed"), [("bandwidth", (0.0, 0.0)), ("latency", (1.0, -1.0))])
def test_a_link_without_speed_is_refused(field: str, speed: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=field):
        LinkSpeed(bandwidth_bytes_per_s=speed[0], latency_s=speed[1])


# Children that may do anything ------------------------------------------------------------------------------


_JOBS = """
import json, os, sys, time
from dataclasses import asdict
from pathlib import Path
from overlap.bench.job import run_job

def refuse(terminal):
    raise TypeError("only on\\nNCCL")

def abort(terminal):
    os.write(2, b"terminate called after throwing an instance of 'E'\\n  what():  8 vs 4\\nmore\\n")
    os.abort()

jobs = {"value": (lambda terminal: [1, 2], 20), "refuse": (refuse, 20), "abort": (abort, 20),
        "hang": (lambda terminal: time.sleep(60), 0.5), "leave": (lambda terminal: os._exit(3), 20)}
folder = Path(sys.argv[1])
print(json.dumps({name: asdict(run_job(job, folder, name, limit_s=s)) for name, (job, s) in jobs.items()}))
"""


def test_a_job_may_do_anything_to_its_process(tmp_path: Path) -> None:
    # In a process of its own: pytest has threads, and those do not go well with forks.
    command = [sys.executable, "-c", _JOBS, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    seen = {name: Outcome(**fields) for name, fields in json.loads(done.stdout).items()}
    assert seen["value"] == Outcome(value=[1, 2])
    assert seen["refuse"].failure == "refuses: TypeError: only on"
    assert seen["abort"].failure == "crashes: SIGABRT: 8 vs 4" and seen["abort"].died
    assert seen["hang"].failure == "hangs: stopped after 0 s"
    assert seen["leave"].failure == "crashes: exit code 3"


def test_the_cause_is_not_what_the_survivors_saw() -> None:
    fine = Outcome(value=1)
    echo = Outcome(failure="refuses: RuntimeError: Connection closed by peer [::1]:1", at=1.0)
    late = Outcome(failure="refuses: ValueError: no", at=2.0)
    crash = Outcome(failure="crashes: SIGABRT: 8 vs 4", at=3.0, died=True)
    assert common_cause([fine, fine]) is None
    assert common_cause([echo, late]) == 1
    assert common_cause([echo, late, crash]) == 2
    assert common_cause([fine, echo]) == 1


# Models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "millions"), [("mlp", 0.79), ("transformer", 5.28), ("resnet18", 11.69)])
def test_workloads_train(name: str, millions: float) -> None:
    one = workload(name)
    model = one.make_model()
    inputs, target = one.make_batch(2)
    loss = nn.functional.cross_entropy(model(inputs), target)
    loss.backward()
    assert torch.isfinite(loss)
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert numel / 1e6 == pytest.approx(millions, rel=0.01)
