"""Recording by events, on a device that is made up; and on a real one where there is one."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import pytest
import torch

from harness import run_ranks, wrap
from harness.models import MLP
from overlap import AllReduce, OverlappedOptimizer, Step, Timeline, chain
from overlap.timeline import clock
from overlap.timeline.clock import EventClock, HostClock, clock_for


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
        return other.at_ms - self.at_ms


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
    times_ms = [events.read_ms(mark) for mark in marks]
    assert [later - times_ms[0] for later in times_ms] == [0.0, 2.5, 5.0]
    assert abs(times_ms[0] - HostClock().read_ms(HostClock().now())) < 60_000


def test_marks_of_the_host_are_comparable_between_clocks() -> None:
    one, other = clock_for(torch.device("cpu")), HostClock()
    assert one.read_ms(one.now()) == pytest.approx(other.read_ms(other.now()), abs=5)


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
