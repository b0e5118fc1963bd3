"""On real ranks with known gradients: nothing is lost, under `join`, `no_sync` and overflow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks, run_threads
from overlap import Int8, PowerSGD, register


class Given(torch.nn.Module):
    """Parameters whose gradients are what is given, so that what comes in is known."""

    SHAPES = ((24, 20), (7,), (20, 24), (30, 10))

    def __init__(self) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(torch.zeros(shape) for shape in self.SHAPES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.all, gradients, strict=True)]).sum()


def _given(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in Given.SHAPES]


def _gradients(ddp: DistributedDataParallel) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]


def _kept(stage: PowerSGD, names: list[str]) -> list[Tensor]:
    """Residuals of this rank; zeros where there is none."""
    found = stage.state_dict()["residuals"]
    return [found.get(name, torch.zeros(shape)) for name, shape in zip(names, Given.SHAPES, strict=True)]


def _total(tensor: Tensor) -> Tensor:
    total = tensor.double()
    dist.all_reduce(total)
    return total


@dataclass
class Joined:
    """What one rank saw of a run in which ranks have unequal inputs; by parameter."""

    sent: list[Tensor]
    """Sums of the gradients that it gave in."""
    received: list[Tensor]
    """Sums of the outputs that it saw, none of those after it had joined."""
    norms_when_joined: list[float]
    """Of its residuals."""
    kept: list[Tensor]
    steps: int


LENGTHS = [9, 3, 6]
LONGEST = LENGTHS.index(max(LENGTHS))


def _join(rank: int, world_size: int, options: dict[str, Any]) -> Joined:
    ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.001)
    names = [f"all.{place}" for place in range(len(Given.SHAPES))]
    stage = PowerSGD(min_compression_rate=0, **options)
    register(ddp, stage)
    sent = [torch.zeros(shape) for shape in Given.SHAPES]
    received = [torch.zeros(shape, dtype=torch.float64) for shape in Given.SHAPES]
    norms_when_joined = []
    with ddp.join():
        for step in range(LENGTHS[rank]):
            gradients = _given(rank, step)
            ddp.zero_grad()
            ddp(gradients).backward()
            for place, parameter in enumerate(ddp.parameters()):
                assert parameter.grad is not None
                sent[place] += gradients[place]
                received[place] += parameter.grad
        norms_when_joined = [float(kept.norm()) for kept in _kept(stage, names)]
    return Joined(sent, received, norms_when_joined, _kept(stage, names), stage.state_dict()["steps"])


@pytest.fixture(scope="module")
def joined() -> list[Joined]:
    return run_ranks(_join, len(LENGTHS), {"rank": 1})


def test_nothing_is_lost_under_join(joined: list[Joined]) -> None:
    _check_sums(joined)


def test_nothing_is_lost_under_join_with_a_wire() -> None:
    """A joined rank replays with zeros: it takes part in the sums of what the wire carries."""
    found = run_ranks(_join, len(LENGTHS), {"rank": 2, "wire": Int8(rounding="stochastic")})
    _check_sums(found)
    for rank, one in enumerate(found):
        if rank != LONGEST:
            for kept, norm_when_joined in zip(one.kept, one.norms_when_joined, strict=True):
                assert float(kept.norm()) < norm_when_joined or norm_when_joined == 0, "its residual goes out"


def _check_sums(joined: list[Joined]) -> None:
    for place in range(len(Given.SHAPES)):
        expected = sum(one.sent[place].double() for one in joined)
        # The last rank saw every output; the others replayed after they had joined.
        found = len(LENGTHS) * joined[LONGEST].received[place] + sum(one.kept[place].double() for one in joined)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=f"gradient {place}")


def test_a_joined_rank_only_gives_its_residual_away(joined: list[Joined]) -> None:
    for rank, one in enumerate(joined):
        if rank != LONGEST:
            for kept, norm_when_joined in zip(one.kept, one.norms_when_joined, strict=True):
                assert float(kept.norm()) <= norm_when_joined * 1.001


def test_every_rank_counts_the_steps_of_the_longest(joined: list[Joined]) -> None:
    assert [one.steps for one in joined] == [max(LENGTHS)] * len(LENGTHS)


def _no_sync(rank: int, world_size: int) -> None:
    outputs = []
    for accumulated in (False, True):
        ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.001)
        stage = PowerSGD(rank=1, min_compression_rate=0)
        register(ddp, stage)
        for step in range(0, 6, 2):
            ddp.zero_grad()
            one, other = _given(rank, step), _given(rank, step + 1)
            if accumulated:
                with ddp.no_sync():
                    ddp(one).backward()
                ddp(other).backward()
            else:
                ddp([a + b for a, b in zip(one, other, strict=True)]).backward()
            outputs.append([parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None])
        assert stage.state_dict()["steps"] == 3
    torch.testing.assert_close(outputs[:3], outputs[3:], rtol=1e-5, atol=1e-6)


def test_accumulated_gradients_are_compressed_once() -> None:
    run_ranks(_no_sync, 2)


def _scaled(rank: int, world_size: int) -> None:
    """A loop with a gradient that overflows on one rank, as under GradScaler."""
    ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.001)
    stage = PowerSGD(rank=2, min_compression_rate=0)
    register(ddp, stage)
    for step in range(6):
        gradients = _given(rank, step)
        if step == 3 and rank == 1:
            for gradient in gradients:
                gradient[0] = float("inf")
        ddp.zero_grad()
        ddp(gradients).backward()
        for parameter in ddp.parameters():
            assert parameter.grad is not None
            assert bool(parameter.grad.isfinite().all()) == (step != 3)
    assert all(bool(tensor.isfinite().all()) for tensor in stage.state_dict()["residuals"].values())


def test_an_overflow_on_one_rank_shows_on_all_ranks_in_that_step_alone() -> None:
    run_ranks(_scaled, 2)


def _threaded(rank: int, world_size: int, options: dict[str, Any]) -> list[Tensor]:
    ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.001)
    stage = PowerSGD(min_compression_rate=0, **options)
    register(ddp, stage)
    names = [f"all.{place}" for place in range(len(Given.SHAPES))]
    for step in range(4):
        before = [_total(kept) for kept in _kept(stage, names)]
        gradients = _given(rank, step)
        ddp.zero_grad()
        ddp(gradients).backward()
        after = [_total(kept) for kept in _kept(stage, names)]
        for place, parameter in enumerate(ddp.parameters()):
            assert parameter.grad is not None
            came_in = _total(gradients[place]) + before[place]
            came_out = parameter.grad.double() * world_size + after[place]
            torch.testing.assert_close(came_out, came_in, rtol=0, atol=2e-4)
    return _gradients(ddp)


@pytest.mark.parametrize("options", [{"rank": 1}, {"rank": 3, "alternate": True}], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_the_invariant_holds_through_ddp(world_size: int, options: dict[str, Any]) -> None:
    for results in zip(*run_threads(_threaded, world_size, options), strict=True):
        assert all(torch.equal(one, results[0]) for one in results)
