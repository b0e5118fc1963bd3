"""What is recorded of real steps, and that recording changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.join import Join

from harness import run_ranks, run_threads, wrap
from harness.models import BATCH_NORM, MLP
from overlap import (
    AllReduce,
    Bucket,
    OverlappedOptimizer,
    RegistrationError,
    Stage,
    Step,
    Timeline,
    TrainingLoopError,
    chain,
)
from overlap.hooks import Role, all_gather, reduce_scatter
from overlap.hooks.engine.registration import registration_of
from overlap.timeline import StepReport


def _model(case: Any = MLP) -> Any:
    return wrap(case.model(), **case.ddp_options())


def _backward(ddp: Any, step: int, rank: int) -> None:
    ddp(*MLP.batch(step, rank).inputs).square().mean().backward()


def _train(ddp: Any, optimizer: Any, steps: range, rank: int) -> None:
    for step in steps:
        optimizer.zero_grad()
        _backward(ddp, step, rank)
        optimizer.step()


def _sgd(ddp: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


def _records_a_chain(rank: int, world_size: int) -> None:
    ddp = _model()
    optimizer = OverlappedOptimizer(_sgd(ddp))
    registration = chain(AllReduce(), Step(optimizer)).register(ddp)
    for step in range(2):
        _backward(ddp, step, rank)
        optimizer.step()
    with Timeline(ddp) as timeline:
        for step in range(4):
            _backward(ddp, step, rank)
            optimizer.step()
    assert registration.is_active and registration.observer is None
    report = timeline.report()
    assert report is timeline.report(), "gathered once"
    assert report.plan == "chain(AllReduce(), Step(SGD, interleaved))"
    assert [len(steps) for steps in report.ranks] == [4] * world_size
    assert min(step.start_ms for step in report.steps) == 0 and max(step.start_ms for step in report.steps) < 60_000
    numel = sum(parameter.numel() for parameter in ddp.parameters())
    for own in report.steps:
        _is_in_order(own)
        assert own.gradient_bytes == 4 * numel
        assert own.sent_bytes == pytest.approx(2 * 4 * numel * (world_size - 1) / world_size, abs=len(own.buckets))
        assert all(bucket.update is not None and bucket.gather is None for bucket in own.buckets)
        assert [phase.name for phase in own.phases] == ["forward", "loss", "backward", "finalization", "optimizer"]


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


def test_every_step_of_a_chain_is_recorded_on_every_rank() -> None:
    run_ranks(_records_a_chain, 2)


def _leaves_plain_ddp_as_it_is(rank: int, world_size: int) -> None:
    recorded, reference = _model(), _model()
    optimizers = [_sgd(recorded), _sgd(reference)]
    hooks = len(recorded._forward_hooks), len(recorded._forward_pre_hooks), len(recorded.module._forward_pre_hooks)
    for part, with_timeline in ((range(3), False), (range(3, 8), True), (range(8, 11), False)):
        if with_timeline:
            with Timeline(recorded) as timeline:
                _train(recorded, optimizers[0], part, rank)
        else:
            _train(recorded, optimizers[0], part, rank)
        _train(reference, optimizers[1], part, rank)
        for ours, plain in zip(recorded.parameters(), reference.parameters(), strict=True):
            assert torch.equal(ours, plain)
    report = timeline.report()
    assert report.plan == "plain DDP" and len(report.ranks[0]) == 5
    for step in report.steps:
        _is_in_order(step)
        assert all(bucket.update is None for bucket in step.buckets)
        assert step.phase_ms("optimizer") > 0
    assert registration_of(recorded) is None
    assert hooks == (
        len(recorded._forward_hooks),
        len(recorded._forward_pre_hooks),
        len(recorded.module._forward_pre_hooks),
    )


def test_plain_ddp_is_recorded_and_trains_on_as_before_bit_for_bit() -> None:
    run_ranks(_leaves_plain_ddp_as_it_is, 2)


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
    ddp = _model()
    chain(Sharded()).register(ddp)
    with Timeline(ddp) as timeline:
        for step in range(3):
            _backward(ddp, step, rank)
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
    ddp = _model()
    chain(Busy()).register(ddp)
    with Timeline(ddp) as timeline:
        for step in range(5):
            _backward(ddp, step, rank)
    firsts = [step.buckets[0] for step in timeline.steps[2:]]
    assert all(first.done_ms - first.ready_ms > 60 for first in firsts), "it came on only behind bucket 1"
    return min(first.reduce.duration_ms for first in firsts if first.reduce is not None)


def test_a_collective_ends_when_it_completes_and_not_when_it_is_waited_for() -> None:
    assert min(run_ranks(_completes_while_the_worker_is_busy, 2)) < 30


def _steps_are_forwards_with_a_backward(rank: int, world_size: int) -> None:
    ddp = wrap(BATCH_NORM.model(), **BATCH_NORM.ddp_options())
    _backward(ddp, 0, rank)
    with Timeline(ddp) as timeline:
        _backward(ddp, 0, rank)
        with torch.no_grad():
            ddp(*MLP.batch(0, rank).inputs)
            time.sleep(0.05)
        (ddp(*MLP.batch(1, rank).inputs) + ddp(*MLP.batch(2, rank).inputs)).sum().backward()
        with ddp.no_sync():
            _backward(ddp, 3, rank)
        _backward(ddp, 4, rank)
        ddp(*MLP.batch(5, rank).inputs)
    steps = timeline.steps
    assert [len(step.in_phase("forward")) for step in steps] == [1, 2, 1, 1, 1]
    assert [len(step.in_phase("backward")) for step in steps] == [1, 1, 1, 1, 0]
    assert [bool(step.buckets) for step in steps] == [True, True, False, True, False]
    assert steps[0].step_ms < 50, "a forward without gradients is part of no step"
    # Under no_sync DDP leaves the buffers of the next forward as they are.
    assert [bool(step.in_phase("buffers")) for step in steps] == [True, True, True, False, True]
    assert steps[0].exposed_ms >= steps[0].phase_ms("buffers")


def test_accumulation_evaluation_and_two_forwards_are_the_steps_that_they_are() -> None:
    run_ranks(_steps_are_forwards_with_a_backward, 2)


def _waits_inside_backward(rank: int, world_size: int) -> None:
    ddp = _model()
    chain(AllReduce()).register(ddp)
    with Timeline(ddp) as timeline:
        for step in range(3):
            _backward(ddp, step, rank)
    for own in timeline.steps:
        waits, (backward,) = own.in_phase("wait"), own.in_phase("backward")
        assert len(waits) == len(own.buckets)
        assert all(backward.start_ms < wait.start_ms <= wait.end_ms < backward.end_ms for wait in waits)
        assert own.exposed_ms >= own.phase_ms("wait") > 0


def test_where_the_training_thread_drives_the_stages_its_waits_are_exposed() -> None:
    run_threads(_waits_inside_backward, 2)


def _has_uneven_inputs(rank: int, world_size: int) -> tuple[list[int], torch.Tensor]:
    ddp = _model()
    with Timeline(ddp) as timeline, Join([ddp]):
        for step in range(2 + 2 * rank):
            _backward(ddp, step, rank)
    report = timeline.report()
    assert all(step.buckets for step in report.steps)
    return [len(steps) for steps in report.ranks], next(ddp.parameters()).detach()


def test_a_rank_that_has_run_out_of_inputs_has_no_more_steps() -> None:
    for counts, _ in run_ranks(_has_uneven_inputs, 2):
        assert counts == [2, 4]


def _is_compiled_inside(rank: int, world_size: int) -> None:
    ddp = wrap(torch.compile(MLP.model(), backend="eager"), bucket_cap_mb=25)  # type: ignore[arg-type]
    with Timeline(ddp) as timeline:
        for step in range(3):
            _backward(ddp, step, rank)
    assert [phase.name for phase in timeline.steps[-1].phases] == ["forward", "loss", "backward", "finalization"]


def test_a_compiled_module_is_recorded() -> None:
    run_ranks(_is_compiled_inside, 1)


class _NotATensor:
    def __init__(self, output: torch.Tensor) -> None:
        self.output = output


class _Wrapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP.model()

    def forward(self, inputs: torch.Tensor) -> _NotATensor:
        return _NotATensor(self.inner(inputs))


def _backward_begins_with_the_first_bucket(rank: int, world_size: int) -> None:
    ddp = wrap(_Wrapped(), **MLP.ddp_options())
    with Timeline(ddp) as timeline:
        for step in range(3):
            ddp(*MLP.batch(step, rank).inputs).output.sum().backward()
    for own in timeline.steps[1:]:
        assert own.backward is not None and own.backward.start_ms <= own.buckets[0].ready_ms
        assert own.in_phase("finalization")


def test_an_output_that_hides_its_tensors_loses_only_the_start_of_backward() -> None:
    run_ranks(_backward_begins_with_the_first_bucket, 1)


class Flaky(AllReduce):
    async def __call__(self, bucket: Bucket) -> None:
        await super().__call__(bucket)
        if (bucket.step, bucket.index) == (2, 1):
            raise ValueError("the dog ate it")


def _survives_failures(rank: int, world_size: int) -> None:
    ddp = _model()
    registration = chain(Flaky()).register(ddp)
    with Timeline(ddp) as timeline:
        for step in range(2):
            _backward(ddp, step, rank)
        with pytest.raises(ValueError, match="the dog"):
            _backward(ddp, 2, rank)
        for step in range(3, 5):
            _backward(ddp, step, rank)
    assert len(timeline.steps) == 5
    broken_off = Timeline(ddp)
    with pytest.raises(KeyError, match="the user's own"):
        _fail_inside(broken_off, lambda: _backward(ddp, 5, rank))
    assert registration.observer is None and len(ddp.module._forward_pre_hooks) == 0
    assert broken_off.steps == (), "its only step has no end"
    registration.remove()
    with pytest.raises(KeyError, match="the user's own"):
        _fail_inside(Timeline(ddp), lambda: None)
    assert registration_of(ddp) is None
    _backward(ddp, 6, rank)


def _fail_inside(timeline: Timeline, work: Callable[[], None]) -> None:
    with timeline:
        work()
        raise KeyError("the user's own")


def test_what_fails_inside_leaves_nothing_behind() -> None:
    run_ranks(_survives_failures, 2)


def _refuses(rank: int, world_size: int) -> None:
    ddp = _model()
    with pytest.raises(RegistrationError, match="Linear is not a DistributedDataParallel model"):
        Timeline(torch.nn.Linear(2, 2)).__enter__()  # type: ignore[arg-type]
    timeline = Timeline(ddp)
    with pytest.raises(TrainingLoopError, match="when its `with` block is over"):
        timeline.report()
    with timeline:
        _backward(ddp, 0, rank)
        with pytest.raises(TrainingLoopError, match="when its `with` block is over"):
            timeline.save("step.json")
        with pytest.raises(RegistrationError, match="has an observer already"), Timeline(ddp):
            pass
    with pytest.raises(TrainingLoopError, match="make another for the next"), timeline:
        pass
    foreign = _model()
    foreign.register_comm_hook(None, _foreign_hook)
    with pytest.raises(RegistrationError, match="_foreign_hook"), Timeline(foreign):
        pass


def _foreign_hook(state, bucket):  # type: ignore[no-untyped-def]
    raise AssertionError


del _foreign_hook.__annotations__


def test_what_cannot_be_recorded_is_an_error_that_says_why() -> None:
    run_ranks(_refuses, 1)
