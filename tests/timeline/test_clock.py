"""Recording by events, on a device that is made up; and on a real one where there is one."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from harness import run_ranks, wrap
from harness.models import MLP
from overlap import AllReduce, OverlappedOptimizer, Step, Timeline, chain
from overlap.timeline import clock
from overlap.timeline.clock import EventClock, HostClock, clock_for
from overlap.timeline.reading import read_steps, synchronized
from overlap.timeline.recording import Recorder, StepRecord


class FakeEvent:
    """Knows its time only when the device has been waited for, as a real one."""

    device_ms = itertools.count(5.0, 2.5)
    waits: ClassVar[list[str]] = []

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: str) -> None:
        assert stream == "current stream of cuda:3"
        self.at_ms = next(self.device_ms)

    def synchronize(self) -> None:
        self.waits.append("event")

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.waits[-1] == "device", "read too early"
        return float(np.float32(other.at_ms - self.at_ms))  # As CUDA gives it.


class FakeModule:
    Event = FakeEvent

    def current_stream(self, device: torch.device) -> str:
        return f"current stream of {device}"

    def synchronize(self, device: torch.device) -> None:
        FakeEvent.waits.append("device")


def test_marks_of_a_device_wait_for_it_once_at_the_start_and_once_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock.torch, "get_device_module", lambda device: FakeModule())
    events = clock_for(torch.device("cuda:3"))
    assert isinstance(events, EventClock) and not events.is_host
    marks = [events.now() for _ in range(3)]
    assert FakeEvent.waits == ["event"], "before the first step"
    events.settle()
    assert [events.elapsed_ms(marks[0], mark) for mark in marks] == [0.0, 2.5, 5.0]
    assert abs(events.calendar_ns(marks[0]) - HostClock().calendar_ns(HostClock().now())) < 60e9


def test_marks_of_the_host_are_comparable_between_clocks() -> None:
    one, other = clock_for(torch.device("cpu")), HostClock()
    assert one.calendar_ns(one.now()) == pytest.approx(other.calendar_ns(other.now()), abs=5e6)


def test_steps_of_the_host_follow_each_other_to_the_nanosecond() -> None:
    # In ms since the Unix epoch a float is no finer than 0.2 us: steps would overlap by as much.
    ends_ns = [1_000_003 * number for number in range(8)]
    records = [StepRecord(start, end) for start, end in itertools.pairwise(ends_ns)]
    ranks = [
        (ahead_ns + 1_700_000_000_123_456_789, read_steps(records, HostClock(), {}, rank=0)) for ahead_ns in (0, 7)
    ]
    for steps, ahead_ns in zip(synchronized(ranks), (0, 7), strict=True):
        starts_ns = [1e6 * step.start_ms - ahead_ns for step in steps]
        assert starts_ns == pytest.approx(ends_ns[:-1], abs=1e-3)
        assert [1e6 * (step.start_ms + step.step_ms) - ahead_ns for step in steps] == pytest.approx(
            ends_ns[1:], abs=1e-3
        )


def test_a_step_after_an_hour_is_measured_as_finely_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock.torch, "get_device_module", lambda device: FakeModule())
    steps_at_ms = [hour * 3_600_000 + number * 200.003 for hour in (0, 1) for number in range(20)]
    at_ms = [0.0, *(at + since for at in steps_at_ms for since in (0.0, 0.007, 100.001))]
    monkeypatch.setattr(FakeEvent, "device_ms", iter(at_ms))
    monkeypatch.setattr(FakeEvent, "waits", ["device"])
    recorder = Recorder(events := clock_for(torch.device("cuda:3")))
    for _ in steps_at_ms:
        start, mark, end = events.now(), events.now(), events.now()
        recorder.steps.append(StepRecord(start, end, phases=[("forward", start, mark)]))
    steps = read_steps(recorder.steps, events, {}, rank=0)
    for step, own_ms in zip(steps, steps_at_ms, strict=True):
        assert step.step_ms == pytest.approx(100.001, abs=1e-4)
        assert step.phases[0].end_ms == pytest.approx(0.007, abs=1e-4)
        # Across the hour less finely, and within it as finely as the calendar's number is.
        first, first_ms = (steps[0], steps_at_ms[0]) if step.step < 20 else (steps[20], steps_at_ms[20])
        assert step.start_ms - first.start_ms == pytest.approx(own_ms - first_ms, abs=1e-3)
    assert steps[20].start_ms - steps[0].start_ms == pytest.approx(3_600_000, abs=0.25)


def _records_on_cuda(rank: int, world_size: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    ddp = wrap(MLP.model().to(device), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))
    chain(AllReduce(), Step(optimizer)).register(ddp)

    def step(number: int) -> None:
        (inputs,) = MLP.batch(number, rank).inputs
        ddp(inputs.to(device)).sum().backward()
        optimizer.step()

    for number in range(3):
        step(number)
    with Timeline(ddp) as timeline:
        for number in range(4):
            step(number)
    report: Any = timeline.report()
    assert [len(steps) for steps in report.ranks] == [4] * world_size
    for own in report.steps:
        assert len(own.buckets) >= 3 and 0 < own.exposed_ms <= own.communication_ms < own.step_ms
        for bucket in own.buckets:
            assert own.backward.start_ms <= bucket.ready_ms <= bucket.reduce.start_ms < bucket.reduce.end_ms
            assert bucket.reduce.end_ms <= bucket.update.start_ms < bucket.update.end_ms <= own.step_ms


@pytest.mark.gpu
def test_steps_on_cuda_are_recorded() -> None:
    run_ranks(_records_on_cuda, 2, backend="nccl")
