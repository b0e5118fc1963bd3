"""What is recorded of real steps, and that recording changes nothing."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks
from overlap import (
    AllReduce,
    Bucket,
    OverlappedOptimizer,
    Stage,
    Step,
    Timeline,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap.hooks import Role, all_gather, reduce_scatter
from overlap.hooks.engine.registration import registration_of
from overlap.optim.zero import shards
from overlap.timeline import StepReport
from timeline.training import make_model, make_sgd, run_backward, train_on

shards._LEAST_BYTES = 1000  # A part for each layer of 16 x 16.

# A chain -----------------------------------------------------------------------------------------------------


def _records_a_chain(rank: int, world_size: int) -> dict[str, Any]:
    ddp = make_model()
    optimizer = OverlappedOptimizer(make_sgd(ddp))
    registration = chain(AllReduce(), Step(optimizer)).register(ddp)
    for step in range(2):
        run_backward(ddp, step, rank)
        optimizer.step()
    with Timeline(ddp) as timeline:
        for step in range(4):
            run_backward(ddp, step, rank)
            optimizer.step()
    report = timeline.report()
    return {
        "report": report,
        "is gathered once": report is timeline.report(),
        "is registered": registration.is_active,
        "is observed": registration.observer is not None,
        "gradient bytes": 4 * sum(parameter.numel() for parameter in ddp.parameters()),
    }


@pytest.fixture(scope="module", params=[0, 1], ids=["rank 0", "rank 1"])
def of_a_chain(request: pytest.FixtureRequest, _chain_on_two_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What one rank has of four recorded steps of a chain."""
    return _chain_on_two_ranks[request.param]


@pytest.fixture(scope="module")
def _chain_on_two_ranks() -> list[dict[str, Any]]:
    return run_ranks(_records_a_chain, 2)


def test_every_step_of_a_chain_is_recorded_on_every_rank(of_a_chain: dict[str, Any]) -> None:
    assert [len(steps) for steps in of_a_chain["report"].ranks] == [4, 4]


def test_the_title_of_a_report_is_the_chain(of_a_chain: dict[str, Any]) -> None:
    assert of_a_chain["report"].title == "chain(AllReduce(), Step(SGD, interleaved))"


def test_a_report_is_gathered_once(of_a_chain: dict[str, Any]) -> None:
    assert of_a_chain["is gathered once"]


def test_the_chain_stays_registered_and_is_no_longer_observed(of_a_chain: dict[str, Any]) -> None:
    assert of_a_chain["is registered"] and not of_a_chain["is observed"]


def test_starts_of_steps_are_counted_from_the_first_of_any_rank(of_a_chain: dict[str, Any]) -> None:
    starts_ms = [step.start_ms for step in of_a_chain["report"].steps]
    assert min(starts_ms) == 0 and max(starts_ms) < 60_000


def test_what_happens_in_a_step_is_in_order(of_a_chain: dict[str, Any]) -> None:
    for step in of_a_chain["report"].steps:
        _is_in_order(step)


def test_the_phases_of_a_step_with_a_chain(of_a_chain: dict[str, Any]) -> None:
    for step in of_a_chain["report"].steps:
        assert [phase.name for phase in step.phases] == ["forward", "loss", "backward", "finalization", "optimizer"]


def test_bytes_of_a_step_are_those_of_its_gradients_and_of_an_all_reduce(of_a_chain: dict[str, Any]) -> None:
    for step in of_a_chain["report"].steps:
        assert step.gradient_bytes == of_a_chain["gradient bytes"]
        # 2 N (W - 1) / W with two ranks is N.
        assert step.sent_bytes == pytest.approx(of_a_chain["gradient bytes"], abs=len(step.buckets))


def test_buckets_of_a_chain_with_a_step_are_updated_and_not_gathered(of_a_chain: dict[str, Any]) -> None:
    for step in of_a_chain["report"].steps:
        assert all(bucket.update is not None and bucket.gather is None for bucket in step.buckets)


def _is_in_order(step: StepReport) -> None:
    assert step.forward is not None and step.backward is not None
    assert (
        0 <= step.forward.start_ms < step.forward.end_ms <= step.backward.start_ms < step.backward.end_ms < step.step_ms
    )
    assert [bucket.index for bucket in step.buckets] == list(range(len(step.buckets))) and len(step.buckets) >= 3
    for bucket in step.buckets:
        assert bucket.reduce is not None
        assert step.backward.start_ms < bucket.ready_ms <= step.backward.end_ms
        assert bucket.ready_ms < bucket.reduce.start_ms < bucket.reduce.end_ms <= bucket.done_ms < step.step_ms
        if bucket.update is not None:
            assert bucket.update.start_ms >= bucket.reduce.end_ms - 0.5
    assert 0 <= step.exposed_ms <= step.communication_ms < step.step_ms
    assert step.exposed_ms + step.exposed_code_ms <= step.phase_ms("finalization") + step.phase_ms("buffers") + 1e-6


# Plain DDP ---------------------------------------------------------------------------------------------------


def _hooks(ddp: Any) -> tuple[int, int, int]:
    return len(ddp._forward_hooks), len(ddp._forward_pre_hooks), len(ddp.module._forward_pre_hooks)


def _records_plain_ddp(rank: int, world_size: int) -> dict[str, Any]:
    recorded, reference = make_model(), make_model()
    optimizers = [make_sgd(recorded), make_sgd(reference)]
    hooks = _hooks(recorded)
    equal = []
    for part, with_timeline in ((range(3), False), (range(3, 8), True), (range(8, 11), False)):
        if with_timeline:
            with Timeline(recorded) as timeline:
                train_on(recorded, optimizers[0], part, rank)
        else:
            train_on(recorded, optimizers[0], part, rank)
        train_on(reference, optimizers[1], part, rank)
        pairs = zip(recorded.parameters(), reference.parameters(), strict=True)
        equal.append(all(torch.equal(ours, plain) for ours, plain in pairs))
    return {
        "report": timeline.report(),
        "is equal": equal,
        "is registered": registration_of(recorded) is not None,
        "has its hooks": _hooks(recorded) == hooks,
    }


@pytest.fixture(scope="module", params=[0, 1], ids=["rank 0", "rank 1"])
def of_plain_ddp(request: pytest.FixtureRequest, _plain_on_two_ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What one rank has of five recorded steps of a model without a stage."""
    return _plain_on_two_ranks[request.param]


@pytest.fixture(scope="module")
def _plain_on_two_ranks() -> list[dict[str, Any]]:
    return run_ranks(_records_plain_ddp, 2)


def test_plain_ddp_trains_as_without_a_recording_in_every_bit_before_during_and_after(
    of_plain_ddp: dict[str, Any],
) -> None:
    assert of_plain_ddp["is equal"] == [True, True, True]


def test_plain_ddp_is_recorded(of_plain_ddp: dict[str, Any]) -> None:
    report = of_plain_ddp["report"]
    assert report.title == "plain DDP" and len(report.ranks[0]) == 5
    for step in report.steps:
        _is_in_order(step)
        assert all(bucket.update is None for bucket in step.buckets)
        assert step.phase_ms("optimizer") > 0


def test_a_recording_of_plain_ddp_leaves_nothing_registered(of_plain_ddp: dict[str, Any]) -> None:
    assert not of_plain_ddp["is registered"] and of_plain_ddp["has its hooks"]


# What is recorded of a bucket --------------------------------------------------------------------------------


class Sharded(Stage):
    """Reduces, updates and gathers by itself, as a sharded update does."""

    role = Role.UPDATE
    reduces = True  # type: ignore[assignment]

    async def __call__(self, bucket: Bucket) -> None:
        size = bucket.group.size()
        numel = -(-bucket.buffer.numel() // size)
        whole = torch.zeros(size * numel)
        whole[: bucket.buffer.numel()] = bucket.buffer
        own = torch.empty(numel)
        await reduce_scatter(own, whole, group=bucket.group)
        time.sleep(0.004)
        await all_gather(whole, own, group=bucket.group)
        bucket.buffer.copy_(whole[: bucket.buffer.numel()])


def _tells_collectives_apart(rank: int, world_size: int) -> None:
    ddp = make_model()
    chain(Sharded()).register(ddp)
    with Timeline(ddp) as timeline:
        for step in range(3):
            run_backward(ddp, step, rank)
    for bucket in timeline.steps[-1].buckets:
        reduce, update, gather = bucket.reduce, bucket.update, bucket.gather
        assert reduce is not None and update is not None and gather is not None
        assert update.duration_ms >= 4
        assert reduce.end_ms <= update.start_ms and update.end_ms <= gather.start_ms
        assert [one.label for one in bucket.collectives()] == ["reduce_scatter", "all_gather"]
        assert bucket.sent_bytes == pytest.approx(2 * bucket.gradient_bytes * (world_size - 1) / world_size, rel=0.02)


def test_reduce_update_and_gather_are_told_apart() -> None:
    run_ranks(_tells_collectives_apart, 2)


class Busy(AllReduce):
    """Keeps the thread that drives the stages from looking after bucket 0."""

    async def __call__(self, bucket: Bucket) -> None:
        if bucket.index == 1:
            time.sleep(0.06)
        await super().__call__(bucket)


def _completes_while_the_worker_is_busy(rank: int, world_size: int) -> float:
    ddp = make_model()
    chain(Busy()).register(ddp)
    with Timeline(ddp) as timeline:
        for step in range(5):
            run_backward(ddp, step, rank)
    firsts = [step.buckets[0] for step in timeline.steps[2:]]
    assert all(first.done_ms - first.ready_ms > 60 for first in firsts), "it came on only behind bucket 1"
    return min(first.reduce.duration_ms for first in firsts if first.reduce is not None)


def test_a_collective_ends_when_it_completes_and_not_when_it_is_waited_for() -> None:
    assert min(run_ranks(_completes_while_the_worker_is_busy, 2)) < 30


def _gathers_in_the_next_forward(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero, gather="forward")).register(ddp)
    gather = zero.exchange.gather

    async def slow_gather(shards: Any, group: Any) -> None:
        await gather(shards, group)
        time.sleep(0.05)

    object.__setattr__(zero.exchange, "gather", slow_gather)
    with Timeline(ddp) as timeline:
        for step in range(5):
            ddp(torch.ones(2, 16) * step).square().mean().backward()
            zero.step()
    for report in timeline.steps[2:-1]:
        (bucket,) = report.buckets
        assert [(one.kind, one.label) for one in bucket.collectives()] == [
            ("reduce", "reduce_scatter"),
            *[("gather", "all_gather")] * 3,
        ]
        # Two are in flight at a time, and the third begins when the first is over.
        first, second, third = bucket.collectives("gather")
        assert first.end_ms <= third.start_ms and second.end_ms < third.end_ms
        # While all is gathered 150 ms pass, in the next forward and not in step().
        assert sum(one.duration_ms for one in report.phases if one.name == "optimizer") < 50


def test_gathers_in_the_next_forward_are_recorded_one_by_one_and_still_in_the_next_forward() -> None:
    run_ranks(_gathers_in_the_next_forward, 2)
