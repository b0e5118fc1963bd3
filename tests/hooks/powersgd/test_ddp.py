"""On real ranks: many buckets on Gloo, every way to register it, `join`, `no_sync`. Each world is started once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, bucket_calls, overlapped_step, plain_step, run_ranks, train, wrap
from harness.models import MLP, TRANSFORMER, Case
from overlap import (
    Int8,
    OverlappedOptimizer,
    PowerSGD,
    PowerSGDState,
    Step,
    as_stage,
    chain,
    fp16_compress_wrapper,
    powerSGD_hook,
    register,
)

STEPS = 6
ONE_BUCKET_MB = 25


def _optimizer(ddp: DistributedDataParallel) -> torch.optim.Optimizer:
    return torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)


def _run(case: Case, rank: int, attach: Callable[[Any], Any], *, min_buckets: int = 2, **ddp_options: Any) -> list[Any]:
    ddp = wrap(case.model(), **{**case.ddp_options(), **ddp_options})
    updates = attach(ddp)
    is_overlapped = isinstance(updates, OverlappedOptimizer)
    step_fn = overlapped_step if is_overlapped else plain_step
    optimizer = updates if is_overlapped else _optimizer(ddp)
    batches = case.batches(rank, steps=STEPS)
    return train(ddp, optimizer, batches, step_fn=step_fn, min_buckets=min_buckets, gradients=not is_overlapped)


def _agree(records: list[Any]) -> None:
    """All ranks have rank 0's parameters, exactly."""
    for name, parameter in records[-1].parameters.items():
        reference = parameter.clone()
        dist.broadcast(reference, 0)
        assert torch.equal(parameter, reference), name


def _many_buckets(rank: int) -> None:
    """One bucket is another order of collectives and other batches, but the same memory by parameter."""
    for options in ({}, {"alternate": True}):
        stages = [PowerSGD(rank=2, min_compression_rate=1, **options) for _ in range(2)]
        with bucket_calls(PowerSGD) as calls:
            records = _run(TRANSFORMER, rank, lambda ddp, stage=stages[0]: register(ddp, stage))
        assert max(calls) >= 2 and stages[0].compression_stats()[0] > 1.5
        _agree(records)
        reference = _run(
            TRANSFORMER,
            rank,
            lambda ddp, stage=stages[1]: register(ddp, stage),
            min_buckets=1,
            bucket_cap_mb=ONE_BUCKET_MB,
        )
        assert_parity(
            records, reference, what=f"{options}, cut in many buckets", exact=False, rtol=1e-3, atol=1e-5,
            reason="collectives of other sizes add up in another order, and six steps depend on each other",
        )  # fmt: skip


def _chain_with_step(ddp: DistributedDataParallel) -> Any:
    optimizer = OverlappedOptimizer(_optimizer(ddp))
    chain(PowerSGD(rank=2, min_compression_rate=1), Step(optimizer)).register(ddp)
    return optimizer


def _chain_state_with_deferred_step(ddp: DistributedDataParallel) -> Any:
    optimizer = OverlappedOptimizer(_optimizer(ddp))
    state = PowerSGDState(None, 2, 0, 1)
    chain(as_stage(powerSGD_hook, state), Step(optimizer, deferred=True)).register(ddp)
    return optimizer


def _register_comm_hook(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(PowerSGDState(None, 2, 0, 1), powerSGD_hook)


def _register_hook_with_group(ddp: DistributedDataParallel) -> None:
    register(ddp, powerSGD_hook, PowerSGDState(dist.group.WORLD, 2, 0, 1))


def _every_way_is_the_same(rank: int) -> None:
    reference = _run(MLP, rank, lambda ddp: register(ddp, PowerSGD(rank=2, min_compression_rate=1)))
    ways = _chain_with_step, _chain_state_with_deferred_step, _register_comm_hook, _register_hook_with_group
    for attach in ways:
        for found, wanted in zip(_run(MLP, rank, attach), reference, strict=True):
            what = f"{attach.__name__}, step {found.step}"
            assert_parity(found.parameters, wanted.parameters, what=what)
            assert_parity(found.optimizer, wanted.optimizer, what=what)


def _half_precision(rank: int) -> None:
    state = PowerSGDState(None, 16, 0, 0)
    exact = _run(MLP, rank, lambda ddp: None)
    records = _run(MLP, rank, lambda ddp: register(ddp, fp16_compress_wrapper(powerSGD_hook), state))
    assert state.iter == STEPS and all(tensor.dtype == torch.float16 for tensor in state.error_dict.values())
    _agree(records)
    assert_parity(
        records[-1].parameters, exact[-1].parameters, what="fp16 factors of full rank", exact=False,
        atol=2e-3, reason="factors are sent in half precision",
    )  # fmt: skip


class Given(torch.nn.Module):
    """Parameters whose gradients are given, so that the input of compression is known."""

    SHAPES = ((24, 20), (7,), (20, 24), (30, 10))
    NAMES = tuple(f"all.{place}" for place in range(len(SHAPES)))

    def __init__(self) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(torch.zeros(shape) for shape in self.SHAPES)

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.all, gradients, strict=True)]).sum()


def _given(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in Given.SHAPES]


def _accumulated(rank: int) -> None:
    """The gradients of passes under `no_sync` are compressed once, together."""
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


SCENARIOS = _many_buckets, _every_way_is_the_same, _half_precision, _accumulated


def _play(rank: int, world_size: int) -> None:
    for scenario in SCENARIOS:
        scenario(rank)


def test_on_two_ranks() -> None:
    run_ranks(_play, 2, timeout_s=180)


LENGTHS = [9, 3, 6]
LONGEST = LENGTHS.index(max(LENGTHS))
Joined = dict[str, Any]


def _kept(stage: PowerSGD) -> list[Tensor]:
    """Residuals of this rank; zeros where there is none."""
    found = stage.state_dict()["residuals"]
    return [found.get(name, torch.zeros(shape)) for name, shape in zip(Given.NAMES, Given.SHAPES, strict=True)]


def _join(rank: int, world_size: int) -> list[Joined]:
    """What one rank saw of runs in which ranks have unequal inputs, by parameter."""
    runs = []
    for options in ({"rank": 1}, {"rank": 2, "wire": Int8(rounding="stochastic")}):
        ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.001)
        stage = PowerSGD(min_compression_rate=0, **options)
        register(ddp, stage)
        sent, received = ([torch.zeros(shape, dtype=torch.float64) for shape in Given.SHAPES] for _ in range(2))
        with ddp.join():
            for step in range(LENGTHS[rank]):
                gradients = _given(rank, step)
                ddp.zero_grad()
                ddp(gradients).backward()
                for place, parameter in enumerate(ddp.parameters()):
                    assert parameter.grad is not None
                    sent[place] += gradients[place]
                    received[place] += parameter.grad
            norms_when_joined = [float(kept.norm()) for kept in _kept(stage)]
        steps = stage.state_dict()["steps"]
        runs.append({"sent": sent, "received": received, "norms": norms_when_joined, "kept": _kept(stage)})
        assert steps == max(LENGTHS)
    return runs


@pytest.fixture(scope="module")
def joined() -> list[list[Joined]]:
    """By run, of each rank."""
    return list(zip(*run_ranks(_join, len(LENGTHS)), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", [0, 1], ids=["without a wire", "with a wire"])
def test_nothing_is_lost_under_join(joined: list[list[Joined]], wire: int) -> None:
    for place in range(len(Given.SHAPES)):
        expected = sum(one["sent"][place] for one in joined[wire])
        # The last rank saw every output; the others replayed after they had joined.
        received = len(LENGTHS) * joined[wire][LONGEST]["received"][place]
        found = received + sum(one["kept"][place].double() for one in joined[wire])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=f"gradient {place}")


@pytest.mark.parametrize("wire", [0, 1], ids=["without a wire", "with a wire"])
def test_a_joined_rank_only_gives_its_residual_away(joined: list[list[Joined]], wire: int) -> None:
    for rank, one in enumerate(joined[wire]):
        if rank != LONGEST:
            for kept, norm_when_joined in zip(one["kept"], one["norms"], strict=True):
                assert float(kept.norm()) <= norm_when_joined * 1.001
