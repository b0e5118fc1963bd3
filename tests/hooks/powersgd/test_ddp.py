"""On real ranks, with many buckets on Gloo."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import overlap
from harness import (
    assert_parity,
    bucket_calls,
    overlapped_step,
    plain_step,
    run_ranks,
    train,
    wrap,
)
from harness.models import BATCH_NORM, MLP, TRANSFORMER, UNUSED_ON_SOME_RANKS, Case, mean_squared_error
from overlap import (
    OverlappedOptimizer,
    PowerSGD,
    PowerSGDState,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
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


def _run(
    case: Case,
    rank: int,
    attach: Callable[[DistributedDataParallel], Any],
    *,
    steps: int = STEPS,
    is_overlapped: bool = False,
    min_buckets: int = 2,
    **ddp_options: Any,
) -> list[Any]:
    ddp = wrap(case.model(), **{**case.ddp_options(), **ddp_options})
    optimizer = attach(ddp) or _optimizer(ddp)
    step_fn = overlapped_step if is_overlapped else plain_step
    batches = case.batches(rank, steps=steps)
    return train(ddp, optimizer, batches, step_fn=step_fn, min_buckets=min_buckets, gradients=not is_overlapped)


def _agree(records: list[Any]) -> None:
    """All ranks have rank 0's parameters, exactly."""
    for name, parameter in records[-1].parameters.items():
        reference = parameter.clone()
        dist.broadcast(reference, 0)
        assert torch.equal(parameter, reference), name


def _many_buckets(rank: int, world_size: int, case: Case, options: dict[str, Any]) -> None:
    stage = PowerSGD(rank=2, min_compression_rate=1, **options)
    with bucket_calls(PowerSGD) as calls:
        records = _run(case, rank, lambda ddp: register(ddp, stage) and None)
    assert max(calls) >= 2 and stage.compression_stats()[0] > 1.5
    _agree(records)
    # One bucket is another order of collectives and other batches, but the same memory by parameter.
    single = PowerSGD(rank=2, min_compression_rate=1, **options)
    reference = _run(
        case,
        rank,
        lambda ddp: register(ddp, single) and None,
        min_buckets=1,
        bucket_cap_mb=ONE_BUCKET_MB,
    )
    assert_parity(
        records,
        reference,
        what=f"{case}, {options}, cut in many buckets",
        exact=False,
        rtol=1e-3,
        atol=1e-5,
        reason="collectives of other sizes add up in another order, and six steps depend on each other",
    )


@pytest.mark.parametrize("options", [{}, {"alternate": True}], ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_many_buckets_on_gloo_are_as_one(world_size: int, options: dict[str, Any]) -> None:
    run_ranks(_many_buckets, world_size, TRANSFORMER, options)


def _register(ddp: DistributedDataParallel) -> None:
    register(ddp, PowerSGD(rank=2, min_compression_rate=1))


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


WAYS = {
    attach.__name__.removeprefix("_"): attach
    for attach in (_chain_with_step, _chain_state_with_deferred_step, _register_comm_hook, _register_hook_with_group)
}


def _train_in_every_way(rank: int, world_size: int) -> dict[str, list[Any]]:
    found = {name: _run(MLP, rank, attach, is_overlapped="step" in name) for name, attach in WAYS.items()}
    return {"register": _run(MLP, rank, _register), **found}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, list[Any]]]:
    """What each rank has after each step, by the way in which compression was registered."""
    return run_ranks(_train_in_every_way, 2)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_register_it_is_the_same(trained: list[dict[str, list[Any]]], way: str) -> None:
    for rank, by_way in enumerate(trained):
        for found, wanted in zip(by_way[way], by_way["register"], strict=True):
            assert_parity(found.parameters, wanted.parameters, what=f"{way}, rank {rank}, step {found.step}")
            assert_parity(found.optimizer, wanted.optimizer, what=f"{way}, rank {rank}, step {found.step}")


def _zero(rank: int, world_size: int) -> None:
    whole, sharded = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    optimizer = OverlappedOptimizer(_optimizer(whole))
    chain(PowerSGD(rank=2, min_compression_rate=1), Step(optimizer)).register(whole)
    zero = ZeroRedundancyOptimizer(sharded.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05, momentum=0.9)
    stage = PowerSGD(rank=2, min_compression_rate=1)
    chain(stage, ZeroStep(zero)).register(sharded)
    for batch in MLP.batches(rank, steps=STEPS):
        overlapped_step(whole, optimizer, batch, mean_squared_error)
        overlapped_step(sharded, zero, batch, mean_squared_error)
        assert_parity(sharded.module.state_dict(), whole.module.state_dict(), what="the sharded update")
    assert stage.compression_stats()[0] > 1.5


def test_a_sharded_update_after_it_equals_the_whole_update() -> None:
    run_ranks(_zero, 2)


def _wrapped(rank: int, world_size: int) -> None:
    state = PowerSGDState(None, 16, 0, 0)
    exact = _run(MLP, rank, lambda ddp: None)
    hook = fp16_compress_wrapper(powerSGD_hook)
    records = _run(MLP, rank, lambda ddp: register(ddp, hook, state) and None)
    assert state.iter == STEPS and all(tensor.dtype == torch.float16 for tensor in state.error_dict.values())
    _agree(records)
    assert_parity(
        records[-1].parameters, exact[-1].parameters, what="fp16 factors of full rank", exact=False,
        atol=2e-3, reason="factors are sent in half precision",
    )  # fmt: skip


def test_factors_can_be_sent_in_half_precision() -> None:
    run_ranks(_wrapped, 2)


def _complex(rank: int, world_size: int) -> None:
    model = torch.nn.Linear(8, 8, dtype=torch.complex64)
    ddps = [wrap(copy.deepcopy(model)) for _ in range(2)]
    stage = PowerSGD(rank=1, min_compression_rate=0)
    register(ddps[1], stage)
    for step in range(3):
        for ddp in ddps:
            ddp.zero_grad()
            ddp(torch.full((2, 8), complex(step, rank + 1), dtype=torch.complex64)).abs().sum().backward()
        for exact, found in zip(ddps[0].parameters(), ddps[1].parameters(), strict=True):
            assert torch.equal(found.grad, exact.grad)
    assert not stage.state_dict()["factors"]


def test_complex_gradients_are_reduced_exactly() -> None:
    run_ranks(_complex, 2)


def _full_rank(rank: int, world_size: int, case: Case) -> None:
    exact = _run(case, rank, lambda ddp: None)
    stage = PowerSGD(rank=64, min_compression_rate=0)
    records = _run(case, rank, lambda ddp: register(ddp, stage) and None)
    assert stage.state_dict()["factors"], "matrices were sent as factors"
    assert_parity(
        records, exact, what=f"{case}, a rank that suffices", exact=False, rtol=1e-3, atol=2e-5,
        reason="products of factors round where plain sums do not",
    )  # fmt: skip


@pytest.mark.parametrize("case", [BATCH_NORM, UNUSED_ON_SOME_RANKS], ids=str)
def test_a_rank_that_suffices_equals_plain_ddp(case: Case) -> None:
    run_ranks(_full_rank, 2, case)


def _resume(rank: int, world_size: int, options: dict[str, Any]) -> None:
    def setup() -> tuple[DistributedDataParallel, Any, Any]:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.01))
        stages = chain(PowerSGD(rank=2, min_compression_rate=1, **options), Step(optimizer))
        stages.register(ddp)
        return ddp, optimizer, stages

    def steps(ddp: Any, optimizer: Any, start: int, stop: int) -> None:
        for step in range(start, stop):
            overlapped_step(ddp, optimizer, MLP.batch(step, rank), mean_squared_error)

    ddp, optimizer, stages = setup()
    steps(ddp, optimizer, 0, 4)
    file = io.BytesIO()
    torch.save([ddp.module.state_dict(), optimizer.state_dict(), stages.state_dict()], file)
    steps(ddp, optimizer, 4, 9)

    resumed, other_optimizer, other_stages = setup()
    file.seek(0)
    model_state, optimizer_state, stage_state = torch.load(file, weights_only=True)
    resumed.module.load_state_dict(model_state)
    other_optimizer.load_state_dict(optimizer_state)
    other_stages.load_state_dict(stage_state)
    steps(resumed, other_optimizer, 4, 9)
    assert_parity(resumed.module.state_dict(), ddp.module.state_dict(), what=f"resumed, {options}")


@pytest.mark.parametrize("options", [{}, {"alternate": True}], ids=str)
def test_a_run_resumes_exactly_with_a_new_model_object(options: dict[str, Any]) -> None:
    run_ranks(_resume, 2, options)


@pytest.mark.parametrize("name", ["PowerSGD", "PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"])
def test_its_names_are_public(name: str) -> None:
    assert name in overlap.__all__ and name in overlap.hooks.__all__
