"""The detector of races, where no scenario shows it: parts of a tensor, events, host memory, waits of the host."""

from collections.abc import Callable

import pytest
import torch

from harness.streams import Detector, active, detecting
from harness.streams.clocks import Stream
from overlap._torch.device import (
    current_stream,
    hold,
    recorded_event,
    synchronize,
)

DEVICE = torch.device("cpu")


def _detector() -> Detector:
    detector = active()
    assert detector is not None
    return detector


def _beside() -> Stream:
    """A new stream that waits for the current one."""
    side = _detector().new_stream()
    side.wait_stream(current_stream(DEVICE))
    return side


def _overlapping(first: slice, second: slice) -> None:
    values = torch.zeros(8, device=DEVICE)
    side = _beside()
    values[first].add_(1)
    with _detector().on_stream(side):
        values[second].add_(1)


def _columns() -> None:
    """Views that have no byte in common though their ranges overlap."""
    values = torch.zeros(4, 4, device=DEVICE)
    side = _beside()
    values[:, 0].add_(1)
    with _detector().on_stream(side):
        torch._foreach_mul_([values[:, 1], values[:, 3]], 2.0)
        torch.add(values[:, 1], 1, out=values[:, 2])


def _event(*, early: bool) -> None:
    values = torch.zeros(8, device=DEVICE)
    with _detector().on_stream(_beside()):
        before = recorded_event(DEVICE)
        values.add_(1)
        after = recorded_event(DEVICE)
    current_stream(DEVICE).wait_event(before if early else after)
    values.sum()


def _through_the_host() -> None:
    """What the host has waited for is done before all that it queues from then on."""
    values = torch.zeros(8, device=DEVICE)
    with _detector().on_stream(_beside()):
        values.add_(1)
    synchronize(DEVICE)
    values.sum()


def _frees(*, holds: bool) -> None:
    """A side stream reads what the current one has made and freed."""
    values = torch.zeros(8, device=DEVICE)
    with _detector().on_stream(_beside()):
        values.sum()
        if holds:
            hold(values)
    del values
    torch.zeros(8, device=DEVICE)


def _pinned() -> torch.Tensor:
    return _detector().make_host_memory(torch.zeros(4), is_pinned=True)


def _copies(*, waits: bool) -> None:
    answers = _pinned()
    answers.copy_(torch.ones(4, device=DEVICE), non_blocking=True)
    copied = recorded_event(DEVICE)
    if waits:
        copied.synchronize()
    answers.tolist()


def _fills_again() -> None:
    """The host writes into pinned memory that a copy may still read."""
    buffer = _pinned()
    buffer.fill_(1)
    torch.zeros(4, device=DEVICE).copy_(buffer, non_blocking=True)
    buffer.fill_(2)


RIGHT: dict[str, Callable[[], None]] = {
    "halves": lambda: _overlapping(slice(0, 4), slice(4, 8)),
    "columns": _columns,
    "an event": lambda: _event(early=False),
    "through the host": _through_the_host,
    "held": lambda: _frees(holds=True),
}

WRONG: dict[str, tuple[Callable[[], None], str]] = {
    "one byte in common": (lambda: _overlapping(slice(0, 5), slice(4, 8)), "race"),
    "an event recorded too early": (lambda: _event(early=True), "race"),
    "not held": (lambda: _frees(holds=False), "use after free"),
    "pinned memory read before the copy": (lambda: _copies(waits=False), "race"),
    "pinned memory written before the copy": (_fills_again, "race"),
}

WAITS: dict[str, Callable[[], object]] = {
    "item": lambda: torch.ones(1, device=DEVICE).item(),
    "cpu": lambda: torch.ones(1, device=DEVICE).cpu().add_(1),
    "a mask": lambda: torch.ones(3, device=DEVICE)[torch.ones(3, device=DEVICE) > 0],
    "from data": lambda: torch.tensor([1.0], device=DEVICE),
    "to the device": lambda: torch.tensor([1.0]).to(DEVICE),
    "an event": lambda: _copies(waits=True),
}


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
