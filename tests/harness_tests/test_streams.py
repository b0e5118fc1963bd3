"""The detector of races finds each kind, and says nothing of what is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from harness.streams import Detector, detecting, one_process
from harness.streams.clocks import Stream
from harness.streams.detector import active
from overlap._torch.device import (
    current_stream,
    hold,
    on_stream,
    recorded_event,
    synchronize,
)

DEVICE = torch.device("cpu")


def _new_stream() -> Stream:
    detector = active()
    assert detector is not None
    return detector.new_stream()


def _two_streams(*, forward: bool = True, back: bool = True) -> None:
    """A side stream changes what the current one has made, and the current one reads it."""
    values, side = torch.zeros(8, device=DEVICE), _new_stream()
    if forward:
        side.wait_stream(current_stream(DEVICE))
    with on_stream(side):
        values.add_(1)
    if back:
        current_stream(DEVICE).wait_stream(side)
    values.sum()


def _overlapping(*, first: slice, second: slice) -> None:
    values, side = torch.zeros(8, device=DEVICE), _new_stream()
    side.wait_stream(current_stream(DEVICE))
    values[first].add_(1)
    with on_stream(side):
        values[second].add_(1)


def _columns() -> None:
    """Views that have no byte in common though their ranges overlap."""
    values, side = torch.zeros(4, 4, device=DEVICE), _new_stream()
    side.wait_stream(current_stream(DEVICE))
    values[:, 0].add_(1)
    with on_stream(side):
        torch._foreach_mul_([values[:, 1], values[:, 3]], 2.0)
        torch.add(values[:, 1], 1, out=values[:, 2])


def _both_read() -> None:
    values, side = torch.zeros(8, device=DEVICE), _new_stream()
    side.wait_stream(current_stream(DEVICE))
    values.sum()
    with on_stream(side):
        values.sum()


def _events(*, early: bool) -> None:
    values, side = torch.zeros(8, device=DEVICE), _new_stream()
    side.wait_stream(current_stream(DEVICE))
    with on_stream(side):
        before = recorded_event(DEVICE)
        values.add_(1)
        after = recorded_event(DEVICE)
    current_stream(DEVICE).wait_event(before if early else after)
    values.sum()


def _through_the_host() -> None:
    """What the host has waited for is done before all that it queues from then on."""
    values, side = torch.zeros(8, device=DEVICE), _new_stream()
    side.wait_stream(current_stream(DEVICE))
    with on_stream(side):
        values.add_(1)
    synchronize(DEVICE)
    values.sum()


def _frees(*, holds: bool = False, waits: bool = False, allocates: bool = True) -> None:
    """A side stream reads what the current one has made and freed."""
    values, side = torch.zeros(8, device=DEVICE), _new_stream()
    side.wait_stream(current_stream(DEVICE))
    with on_stream(side):
        values.sum()
        if holds:
            hold(values)
    del values
    if waits:
        current_stream(DEVICE).wait_stream(side)
    if allocates:
        torch.zeros(8, device=DEVICE)


def _pinned() -> torch.Tensor:
    detector = active()
    assert detector is not None
    return detector.make_host_memory(torch.zeros(4), is_pinned=True)


def _copies(*, waits: bool) -> None:
    answers = _pinned()
    answers.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
    copied = recorded_event(DEVICE)
    if waits:
        copied.synchronize()
    answers.tolist()


def _fills_again(*, waits: bool) -> None:
    """The host writes into pinned memory that a copy may still read."""
    values = torch.zeros(4, device=DEVICE)
    buffer = _pinned()
    buffer.fill_(1)
    values.copy_(buffer, non_blocking=True)
    if waits:
        synchronize(DEVICE)
    buffer.fill_(2)


def _collective(*, waits: bool) -> None:
    values = torch.ones(8, device=DEVICE)
    work = dist.all_reduce(values, async_op=True)
    if waits:
        work.wait()
    assert values.sum() == 16


RIGHT: dict[str, Callable[[], None]] = {
    "both wait": _two_streams,
    "halves": lambda: _overlapping(first=slice(0, 4), second=slice(4, 8)),
    "columns": _columns,
    "both read": _both_read,
    "an event": lambda: _events(early=False),
    "through the host": _through_the_host,
    "held": lambda: _frees(holds=True),
    "waited for": lambda: _frees(waits=True),
    "freed, never lent again": lambda: _frees(allocates=False),
    "a collective": lambda: _collective(waits=True),
}

WRONG: dict[str, tuple[Callable[[], None], str]] = {
    "the side stream does not wait": (lambda: _two_streams(forward=False), "race"),
    "the current stream does not wait": (lambda: _two_streams(back=False), "race"),
    "one byte in common": (lambda: _overlapping(first=slice(0, 5), second=slice(4, 8)), "race"),
    "an event recorded too early": (lambda: _events(early=True), "race"),
    "not held": (_frees, "use after free"),
    "pinned memory read before the copy": (lambda: _copies(waits=False), "race"),
    "pinned memory written before the copy": (lambda: _fills_again(waits=False), "race"),
    "a collective not waited for": (lambda: _collective(waits=False), "race"),
}

WAITS: dict[str, Callable[[], None]] = {
    "item": lambda: torch.ones(1, device=DEVICE).item(),
    "cpu": lambda: torch.ones(1, device=DEVICE).cpu().add_(1),
    "equal": lambda: torch.equal(torch.ones(1, device=DEVICE), torch.ones(1, device=DEVICE)),
    "a mask": lambda: torch.ones(3, device=DEVICE)[torch.ones(3, device=DEVICE) > 0],
    "to the device": lambda: torch.tensor([1.0]).to(DEVICE),
    "an event": lambda: _copies(waits=True),
    "a barrier": dist.barrier,
}


@pytest.fixture(scope="module", autouse=True)
def _group():
    with one_process(2):
        yield


def _watched(example: Callable[[], object]) -> Detector:
    with detecting() as detector, detector.steps():
        example()
    return detector


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_silent(name: str) -> None:
    report = _watched(RIGHT[name]).report
    assert report.operators > 1
    assert not report.faults, report.faults[0]


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(name: str) -> None:
    example, kind = WRONG[name]
    detector = _watched(example)
    assert {fault.kind for fault in detector.report.faults} == {kind}
    assert "test_streams.py" in str(detector.report.faults[0])
    with pytest.raises(AssertionError, match=kind):
        detector.report.check()


@pytest.mark.parametrize("name", WAITS)
def test_where_the_host_waits_is_noted(name: str) -> None:
    report = _watched(WAITS[name]).report
    assert len(report.host_syncs) == 1
    assert "tests/harness_tests/test_streams.py" in str(report.host_syncs[0])
    report.check()  # The library did not.
