"""The simulated link."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks
from overlap.bench.collectives import counted_bytes
from overlap.bench.registry import registry
from overlap.bench.settings import RunConfig, Settings
from overlap.bench.simulated import SIMULATED_BACKEND, SimulatedLink, register_simulated_backend
from overlap.bench.training_setup import TrainingSetup
from overlap.bench.world import open_world
from overlap.errors import UnsupportedError


def simulate(rank: int, ranks: int, bandwidth_bytes_per_s: float) -> None:
    register_simulated_backend(SimulatedLink(bandwidth_bytes_per_s=bandwidth_bytes_per_s))
    dist.init_process_group(SIMULATED_BACKEND, store=dist.HashStore(), rank=0, world_size=ranks)


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


def _collect_in_parts(rank: int, world_size: int) -> dict[str, Any]:
    """What is for other ranks, or comes from them, part by part."""
    simulate(rank, 3, 1e9)
    mine = torch.tensor([1.0, 2.0, 3.0])
    got: dict[str, Any] = {}

    def new(numel: int = 1) -> torch.Tensor:
        return torch.full((numel,), -1.0)

    dist.all_to_all_single(got.setdefault("all to all", new(3)), mine)
    dist.all_to_all_single(got.setdefault("uneven all to all", new(6)), mine, [2, 2, 2], [2, 0, 1])
    dist.all_to_all(got.setdefault("all to all in a list", [new() for _ in range(3)]), list(mine.split(1)))
    dist.reduce_scatter(got.setdefault("reduce scatter of a list", new()), list(mine.split(1)))
    dist.gather(mine, got.setdefault("gather", [new(3) for _ in range(3)]))
    dist.scatter(got.setdefault("scatter", new()), list(mine.split(1)))
    dist.reduce(got.setdefault("reduce", mine.clone()), dst=0)
    messages = [dist.P2POp(dist.isend, mine, 1), dist.P2POp(dist.irecv, got.setdefault("message", new(3)), 1)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    group: Any = dist.group.WORLD
    options = dist.ReduceScatterOptions()
    gathered, summed = got.setdefault("coalesced gathers", [new(3), new(6)]), got.setdefault("sums", [new(), new()])
    group.allgather_into_tensor_coalesced(gathered, [mine[:1], mine[:2]]).wait()
    group.reduce_scatter_tensor_coalesced(summed, [mine, 2 * mine], options).wait()
    dist.barrier()
    return got


def test_parts_are_those_that_equal_ranks_would_send() -> None:
    (got,) = run_ranks(_collect_in_parts, 1, backend=None)
    expected: dict[str, list[float]] = {
        "all to all": [1, 1, 1],
        "uneven all to all": [1, 2, 1, 2, 1, 2],
        "all to all in a list": [1, 1, 1],
        "reduce scatter of a list": [3],
        "gather": [1, 2, 3] * 3,
        "scatter": [1],
        "reduce": [3, 6, 9],
        "message": [0, 0, 0],
        "coalesced gathers": [1, 1, 1, 1, 2, 1, 2, 1, 2],
        "sums": [3, 6],
    }
    flat = {name: torch.cat(tensors if isinstance(tensors, list) else [tensors]) for name, tensors in got.items()}
    assert {name: tensor.tolist() for name, tensor in flat.items()} == expected


def _time_messages(rank: int, world_size: int) -> tuple[float, float, float]:
    register_simulated_backend(SimulatedLink(bandwidth_bytes_per_s=1e9, latency_s=0.1))
    dist.init_process_group(SIMULATED_BACKEND, store=dist.HashStore(), rank=0, world_size=4)
    group: Any = dist.group.WORLD
    tensor, before = torch.ones(1000), counted_bytes()

    def exchange() -> list[Any]:
        return [
            work
            for peer in (1, 2, 3)
            for work in (group.recv([tensor], peer, 0), group.send([tensor.clone()], peer, 0))
        ]

    start = time.perf_counter()
    for work in exchange():
        work.wait()
    alone_s = time.perf_counter() - start
    sent = counted_bytes() - before
    start = time.perf_counter()
    group._start_coalescing(tensor.device)
    exchange()
    group._end_coalescing(tensor.device).wait()
    return alone_s, time.perf_counter() - start, sent


def test_messages_take_the_time_of_sending_and_together_one_latency() -> None:
    ((alone_s, together_s, sent),) = run_ranks(_time_messages, 1, backend=None)
    assert sent == 3 * 4000
    assert 0.3 <= alone_s < 0.55 and 0.1 <= together_s < 0.28


def _change_speed(rank: int, world_size: int) -> list[float]:
    link = SimulatedLink(bandwidth_bytes_per_s=1e9)
    register_simulated_backend(link)
    dist.init_process_group(SIMULATED_BACKEND, store=dist.HashStore(), rank=0, world_size=2)
    elapsed_s = []
    for bandwidth_bytes_per_s in (1e9, 4e6):
        link.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        start = time.perf_counter()
        dist.all_reduce(torch.ones(100_000))
        elapsed_s.append(time.perf_counter() - start)
    return elapsed_s


def test_the_speed_of_a_link_can_change_between_steps() -> None:
    ((fast_s, slow_s),) = run_ranks(_change_speed, 1, backend=None)
    assert fast_s < 0.09 and slow_s >= 0.1


def _refuse(rank: int, world_size: int) -> None:
    simulate(rank, 3, 1e9)
    with pytest.raises(NotImplementedError, match="knows SUM, AVG, MIN and MAX"):
        dist.all_reduce(torch.ones(3), op=dist.ReduceOp.PRODUCT)


def test_a_reduction_that_cannot_be_simulated_is_an_error_that_says_so() -> None:
    run_ranks(_refuse, 1, backend=None)


def _wait_in_callbacks(rank: int, world_size: int) -> list[float]:
    simulate(rank, 2, 1e9)

    def follow(future: Any) -> Any:
        work = dist.all_reduce(future.value()[0], async_op=True)
        assert work is not None
        work.wait()
        return future.value()[0]

    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(8)]
    return [work.get_future().then(follow).wait().item() for work in works if work is not None]


def test_callbacks_may_wait_for_collectives_of_their_own() -> None:
    assert run_ranks(_wait_in_callbacks, 1, backend=None) == [[4.0] * 8]


def _train_every_row(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    settings = Settings(model="mlp", device="cpu", bandwidth="100gbit", bucket_cap_mb=1)
    config = RunConfig(settings=settings, variants=(), folder=folder, link="simulated", deadline=0.0)
    sent: dict[str, Any] = {}
    for name, row in registry().items():
        if not name.startswith("overlap-"):
            continue
        with open_world(config, rank, name) as world:
            setup = _Watched(world.training_setup(row.optimizer))
            try:
                loop = row.build(setup)
                with loop.block(steps := 3 + row.block_steps):
                    for _ in range(steps):
                        before = counted_bytes()
                        loop.step()
                        sent[name] = max(counted_bytes() - before, sent.get(name, 0.0))
                    loop.finish()
            except UnsupportedError as refusal:
                sent[name] = str(refusal)
                continue
            (model,) = setup.models
            assert all(bool(parameter.isfinite().all()) for parameter in model.parameters()), name
    return sent


class _Watched(TrainingSetup):
    """Keeps the models that it made."""

    def __init__(self, setup: TrainingSetup) -> None:
        vars(self).update(vars(setup))
        self.models: list[nn.Module] = []

    def model(self) -> nn.Module:
        self.models.append(super().model())
        return self.models[-1]


def test_every_row_of_ours_but_joins_runs_on_a_simulated_link(tmp_path: Path) -> None:
    (sent,) = run_ranks(_train_every_row, 1, str(tmp_path), backend=None, timeout_s=150)
    refused = {name for name, value in sent.items() if isinstance(value, str)}
    assert refused == {"overlap-join", "overlap-join-unknown"}
    assert all("has one process" in sent.pop(name) for name in refused)
    assert len(sent) >= 20
    assert not [name for name, value in sent.items() if not value]
    # Of 4 bytes a gradient, 2 go to the other rank; int8 and int4 send a quarter and an eighth of both halves.
    whole = sent["overlap-step-adamw"]
    assert sent["overlap-fp16"] == pytest.approx(whole / 2, rel=0.001)
    assert whole / 4 < sent["overlap-quantize8"] < 1.1 * whole / 4
    assert whole / 8 < sent["overlap-quantize4"] < 1.1 * whole / 8
