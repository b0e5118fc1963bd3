"""What is recorded of real steps, and that recording changes nothing."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from harness import UNKNOWN_BACKEND, on_ranks, wrap
from harness.models import BATCH_NORM, MLP
from overlap import (
    AllReduce,
    Bucket,
    OverlappedOptimizer,
    RegistrationError,
    Step,
    Timeline,
    TrainingLoopError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
    declare,
)
from overlap._torch.device import DeviceStreams, streams_replaced
from overlap.hooks.engine.registration import registration_of
from overlap.optim.zero import exchange
from overlap.timeline import StepReport, profile
from overlap.timeline.recording import EventClock, Recorder, StepRecord

exchange._LEAST_BYTES = 1000  # A part for each layer of 16 x 16.


def make_model(case: Any = MLP) -> Any:
    return wrap(case.model(), **case.ddp_options())


def run_backward(ddp: Any, step: int, rank: int) -> None:
    ddp(*MLP.batch(step, rank).inputs).square().mean().backward()


def _is_in_order(step: StepReport) -> None:
    (forward,), (backward,) = step.in_phase("forward"), step.in_phase("backward")
    assert 0 <= forward.start_ms < forward.end_ms <= backward.start_ms < backward.end_ms < step.step_ms
    assert [bucket.index for bucket in step.buckets] == list(range(len(step.buckets))) and len(step.buckets) >= 3
    for bucket in step.buckets:
        assert bucket.reduce is not None
        assert backward.start_ms < bucket.ready_ms <= backward.end_ms
        assert bucket.ready_ms < bucket.reduce.start_ms < bucket.reduce.end_ms <= bucket.done_ms < step.step_ms
        if bucket.update is not None:
            assert bucket.update.start_ms >= bucket.reduce.end_ms - 0.5
    assert 0 <= step.exposed_ms <= step.communication_ms < step.step_ms
    assert step.exposed_ms <= step.phase_ms("finalization") + step.phase_ms("buffers") + 1e-6


# Recordings --------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_chain(rank: int, world_size: int) -> None:
    ddp = make_model()
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))
    registration = chain(AllReduce(), Step(optimizer)).register(ddp)

    def steps(count: int) -> None:
        for step in range(count):
            run_backward(ddp, step, rank)
            optimizer.step()

    steps(2)
    with Timeline(ddp) as timeline:
        steps(4)
    report = timeline.report()
    assert [len(of) for of in report.ranks] == [4, 4] and report is timeline.report(), "gathered once"
    assert report.title == "chain(AllReduce(), Step(SGD, interleaved))"
    assert registration.is_active and registration.runtime.executor.observer is None
    gradient_bytes = 4 * sum(parameter.numel() for parameter in ddp.parameters())
    for step in report.steps:
        _is_in_order(step)
        assert [phase.name for phase in step.phases] == ["forward", "loss", "backward", "finalization", "optimizer"]
        assert sum(bucket.gradient_bytes for bucket in step.buckets) == gradient_bytes
        # 2 N (W - 1) / W with two ranks is N.
        assert step.sent_bytes == pytest.approx(gradient_bytes, abs=len(step.buckets))
        assert all(bucket.update is not None and bucket.gather is None for bucket in step.buckets)


@on_ranks(2)
def test_plain_ddp(rank: int, world_size: int) -> None:
    """In every bit as without a recording: before, during and after."""
    recorded, reference = make_model(), make_model()
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9) for ddp in (recorded, reference)]

    def train(ddp: Any, optimizer: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            run_backward(ddp, step, rank)
            optimizer.step()

    def hooks() -> tuple[int, ...]:
        return len(recorded._forward_hooks), len(recorded.module._forward_pre_hooks)

    before = hooks()
    for steps in (range(3), range(3, 8), range(8, 11)):
        if steps.start == 3:
            with Timeline(recorded) as timeline:
                train(recorded, optimizers[0], steps)
        else:
            train(recorded, optimizers[0], steps)
        train(reference, optimizers[1], steps)
        assert all(map(torch.equal, recorded.parameters(), reference.parameters()))
    assert registration_of(recorded) is None and hooks() == before
    report = timeline.report()
    assert report.title == "plain DDP" and len(report.ranks[0]) == 5
    for step in report.steps:
        _is_in_order(step)
        assert all(bucket.update is None for bucket in step.buckets) and step.phase_ms("optimizer") > 0


@declare("element")
class _Slow(torch.optim.SGD):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        time.sleep(0.004)
        super().step()


@on_ranks(2)
def test_reduce_update_and_gather(rank: int, world_size: int) -> None:
    ddp = make_model()
    zero = ZeroRedundancyOptimizer(ddp.parameters(), _Slow, lr=0.1)
    chain(ZeroStep(zero)).register(ddp)
    with Timeline(ddp) as timeline:
        for step in range(3):
            run_backward(ddp, step, rank)
            zero.step()
    for bucket in timeline.steps[-1].buckets:
        reduce, update, gather = bucket.reduce, bucket.update, bucket.gather
        assert reduce is not None and update is not None and gather is not None
        assert update.duration_ms >= 4 and reduce.end_ms <= update.start_ms and update.end_ms <= gather.start_ms
        assert [one.label for one in bucket.collectives()] == ["reduce_scatter", "all_gather"]
        assert bucket.sent_bytes == pytest.approx(2 * bucket.gradient_bytes * (world_size - 1) / world_size, rel=0.02)


class Busy(AllReduce):
    """Keeps the thread that drives the stages from looking after bucket 0."""

    async def __call__(self, bucket: Bucket) -> None:
        if bucket.index == 1:
            time.sleep(0.06)
        await super().__call__(bucket)


@on_ranks(2)
def test_a_collective_that_completes_while_the_worker_is_busy(rank: int, world_size: int) -> None:
    ddp = make_model()
    chain(Busy()).register(ddp)
    with Timeline(ddp) as timeline:
        for step in range(5):
            run_backward(ddp, step, rank)
    firsts = [step.buckets[0] for step in timeline.steps[2:]]
    assert all(first.done_ms - first.ready_ms > 60 for first in firsts), "it continued only after bucket 1"
    assert min(first.reduce.duration_ms for first in firsts if first.reduce is not None) < 40


@on_ranks(2)
def test_gathers_in_the_next_forward(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero, gather="forward")).register(ddp)
    (stage,) = zero.updates
    gathering = stage.gathering  # type: ignore[attr-defined]
    stage.gathering = lambda shards, group: (*gathering(shards, group), lambda: time.sleep(0.05))  # type: ignore[attr-defined]
    with Timeline(ddp) as timeline:
        for step in range(5):
            ddp(torch.ones(2, 16) * step).square().mean().backward()
            zero.step()
    for report in timeline.steps[2:-1]:
        (bucket,) = report.buckets
        labels = [(one.kind, one.label) for one in bucket.collectives()]
        assert labels == [("reduce", "reduce_scatter"), *[("gather", "all_gather")] * 3]
        # Two are in flight at a time, and the third begins when the first is over.
        first, second, third = bucket.collectives("gather")
        assert first.end_ms <= third.start_ms and second.end_ms < third.end_ms
        # While all is gathered 150 ms pass, in the next forward and not in step().
        assert report.phase_ms("optimizer") < 50


@on_ranks(2)
def test_boundaries_of_steps(rank: int, world_size: int) -> None:
    """An evaluation after the first step, two forwards in the second, the third under no_sync, no last backward."""
    ddp = wrap(BATCH_NORM.model(), **BATCH_NORM.ddp_options())
    run_backward(ddp, 0, rank)
    with Timeline(ddp) as timeline:
        run_backward(ddp, 0, rank)
        with torch.no_grad():
            ddp(*MLP.batch(0, rank).inputs)
        (ddp(*MLP.batch(1, rank).inputs) + ddp(*MLP.batch(2, rank).inputs)).sum().backward()
        with ddp.no_sync():
            run_backward(ddp, 3, rank)
        run_backward(ddp, 4, rank)
        ddp(*MLP.batch(5, rank).inputs)
    steps = timeline.steps
    assert [len(step.in_phase("forward")) for step in steps] == [1, 2, 1, 1, 1]
    assert [len(step.in_phase("backward")) for step in steps] == [1, 1, 1, 1, 0]
    assert [bool(step.buckets) for step in steps] == [True, True, False, True, False]
    # Under no_sync DDP leaves the buffers of the next forward as they are.
    assert [bool(step.in_phase("buffers")) for step in steps] == [True, True, True, False, True]
    assert steps[0].exposed_ms >= steps[0].phase_ms("buffers")


@on_ranks(2)
def test_uneven_inputs(rank: int, world_size: int) -> None:
    ddp = make_model()
    with Timeline(ddp) as timeline, Join([ddp]):
        for step in range(2 + 2 * rank):
            run_backward(ddp, step, rank)
    report = timeline.report()
    assert [len(steps) for steps in report.ranks] == [2, 4] and all(step.buckets for step in report.steps)


class _Hides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP.model()

    def forward(self, inputs: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(output=self.inner(inputs))


@on_ranks(2)
def test_an_output_that_hides_its_tensors(rank: int, world_size: int) -> None:
    """It loses only the start of backward, which begins with the first bucket."""
    ddp = wrap(_Hides(), **MLP.ddp_options())
    with Timeline(ddp) as timeline:
        for step in range(3):
            ddp(*MLP.batch(step, rank).inputs).output.sum().backward()
    for own in timeline.steps[1:]:
        assert own.in_phase("backward")[0].start_ms <= own.buckets[0].ready_ms
        assert own.in_phase("finalization")


@on_ranks(2)
def test_a_compiled_module(rank: int, world_size: int) -> None:
    ddp = wrap(torch.compile(MLP.model(), backend="eager"), bucket_cap_mb=25)  # type: ignore[arg-type]
    with Timeline(ddp) as timeline:
        for step in range(3):
            run_backward(ddp, step, rank)
    assert [phase.name for phase in timeline.steps[-1].phases] == ["forward", "loss", "backward", "finalization"]


@on_ranks(2)
def test_labels_in_profiles(rank: int, world_size: int) -> None:
    ddp = make_model()
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))
    chain(AllReduce(), Step(optimizer)).register(ddp)

    def labels(profiled: Any) -> set[str]:
        with profiled(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
            for step in range(2):
                run_backward(ddp, step, rank)
                optimizer.step()
        events = [event for event in recorded.events() if event.name.startswith("overlap::")]
        assert all(event.is_user_annotation for event in events), "a GPU shows no row for them"
        return {event.name for event in events}

    run_backward(ddp, 0, rank)
    optimizer.step()
    assert labels(torch.profiler.profile) == set(), "if these show now, the documentation can be simpler"
    shown = labels(profile)
    for label in ("AllReduce()", "all_reduce", "Step(SGD, interleaved)"):
        assert {f"overlap::{label}[bucket {index}]" for index in range(3)} <= shown


class Flaky(AllReduce):
    async def __call__(self, bucket: Bucket) -> None:
        await super().__call__(bucket)
        if (bucket.step, bucket.index) == (2, 1):
            raise ValueError("the dog ate it")


@on_ranks(2)
def test_a_stage_that_fails(rank: int, world_size: int) -> None:
    ddp = make_model()
    chain(Flaky()).register(ddp)
    with Timeline(ddp) as timeline:
        for step in range(5):
            if step == 2:
                with pytest.raises(ValueError, match="the dog"):
                    run_backward(ddp, 2, rank)
            else:
                run_backward(ddp, step, rank)
    assert len(timeline.steps) == 5


@on_ranks(2)
def test_a_block_that_fails(rank: int, world_size: int) -> None:
    for is_plain in (True, False):
        ddp = make_model()
        registration = None if is_plain else chain(AllReduce()).register(ddp)
        broken_off = Timeline(ddp)
        with pytest.raises(KeyError, match="the user's own"), broken_off:
            run_backward(ddp, 5, rank), {}["the user's own"]
        assert registration_of(ddp) is registration and len(ddp.module._forward_pre_hooks) == 0
        assert broken_off.steps == (), "its only step has no end"
        run_backward(ddp, 6, rank)


@on_ranks(2)
def test_misuse(rank: int, world_size: int) -> None:
    ddp = make_model()
    timeline = Timeline(ddp)
    with pytest.raises(TrainingLoopError, match="when its `with` block is over"):
        timeline.report()
    with timeline:
        run_backward(ddp, 0, rank)
        with pytest.raises(TrainingLoopError, match="when its `with` block is over"):
            timeline.report()
        with pytest.raises(RegistrationError, match="has an observer already"), Timeline(ddp):
            pass
    with pytest.raises(TrainingLoopError, match="make another for the next"), timeline:
        pass
    hooked = make_model()
    hooked.register_comm_hook(None, _foreign_hook)
    with pytest.raises(RegistrationError, match="_foreign_hook"), Timeline(hooked):
        pass


def _foreign_hook(state, bucket):  # type: ignore[no-untyped-def]
    raise AssertionError


_foreign_hook.__annotations__.clear()


@on_ranks(2, backend=UNKNOWN_BACKEND)
def test_if_the_training_thread_drives_the_stages_its_waits_are_exposed(rank: int, world_size: int) -> None:
    ddp = make_model()
    chain(AllReduce()).register(ddp)
    with Timeline(ddp) as timeline:
        for step in range(3):
            run_backward(ddp, step, rank)
    for own in timeline.steps:
        waits, (backward,) = own.in_phase("wait"), own.in_phase("backward")
        assert len(waits) == len(own.buckets)
        assert all(backward.start_ms < wait.start_ms <= wait.end_ms < backward.end_ms for wait in waits)
        assert own.exposed_ms >= own.phase_ms("wait") > 0


def test_a_model_without_ddp_is_refused() -> None:
    with pytest.raises(RegistrationError, match=r"Linear is no.* DistributedDataParallel model"):
        Timeline(nn.Linear(2, 2)).__enter__()  # type: ignore[arg-type]


# Clocks ------------------------------------------------------------------------------------------------------


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device

    def record(self, stream: str) -> None:
        assert stream == "current stream of cuda:3"
        self.at_ms = next(self.device.now_ms)

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.device.waits, "read too early"
        return other.at_ms - self.at_ms


class FakeDevice(DeviceStreams):
    """Its events know their time only when it has been waited for, as real ones."""

    def __init__(self) -> None:
        self.now_ms, self.waits = itertools.count(5.0, 2.5), 0

    def current_stream(self, device: torch.device) -> str:
        return f"current stream of {device}"

    def new_event(self, device: torch.device, *, is_timed: bool) -> FakeEvent:
        assert is_timed
        return FakeEvent(self)

    def synchronize(self, device: torch.device) -> None:
        self.waits += 1


def test_a_device_is_waited_for_once_when_all_is_recorded() -> None:
    recorder = Recorder(events := EventClock(torch.device("cuda:3")), {})
    with streams_replaced(device := FakeDevice()):
        for _ in range(3):
            start, mark, end = events.now(), events.now(), events.now()
            recorder.steps.append(StepRecord(start, end, phases=[("forward", start, mark)]))
        assert device.waits == 0, "during the recording"
        steps = recorder.read(rank=0)
    assert device.waits == 1
    assert not events.is_host
    assert [(step.step_ms, step.phases[0].end_ms) for step in steps] == [(5.0, 2.5)] * 3
