"""The simulated link."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks
from overlap.bench.collectives import counted_bytes
from overlap.bench.simulated import SIMULATED_BACKEND, LinkSpeed, SingleProcessStore, register_simulated_backend


def simulate(rank: int, ranks: int, bandwidth_bytes_per_s: float) -> None:
    register_simulated_backend(LinkSpeed(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=0.0))
    dist.init_process_group(SIMULATED_BACKEND, store=SingleProcessStore(ranks), rank=0, world_size=ranks)


def _train(rank: int, world_size: int) -> dict[str, Any]:
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


# Of an all-reduce of the model's gradients at 4 ranks.
_SENT_BYTES = 1.5 * 4 * (200 * 100 + 100)


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    (seen,) = run_ranks(_train, 1, backend=None)
    return seen  # type: ignore[no-any-return]


def test_a_simulated_ddp_has_the_gradients_of_equal_ranks(trained: dict[str, Any]) -> None:
    assert trained["same"]


def test_bytes_on_a_simulated_link_are_counted(trained: dict[str, Any]) -> None:
    assert trained["sent"] == _SENT_BYTES


def test_a_backward_on_a_simulated_link_takes_the_time_of_sending(trained: dict[str, Any]) -> None:
    assert trained["elapsed_s"] > _SENT_BYTES / 4e6


def _collect(rank: int, world_size: int) -> list[Any]:
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
    return [gathered, *listed, scattered, averaged, largest]


def test_simulated_collectives_act_as_if_all_ranks_were_equal() -> None:
    (seen,) = run_ranks(_collect, 1, backend=None)
    mine = torch.tensor([1.0, 2.0, 3.0])
    expected = [mine.repeat(3), mine, mine, mine, torch.tensor([3.0]), mine, mine]
    assert all(torch.equal(got, want) for got, want in zip(seen, expected, strict=True))


def _refuse(rank: int, world_size: int) -> None:
    simulate(rank, 3, 1e9)
    with pytest.raises(NotImplementedError, match="a simulated link has no alltoall_base"):
        dist.all_to_all_single(torch.zeros(3), torch.ones(3))
    with pytest.raises(NotImplementedError, match="knows SUM, AVG, MIN and MAX"):
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.PRODUCT)


def test_a_collective_that_cannot_be_simulated_is_an_error_that_names_it() -> None:
    run_ranks(_refuse, 1, backend=None)


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
