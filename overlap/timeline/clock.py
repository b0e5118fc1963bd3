"""Reading the time without delaying the step."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from overlap._torch.device import has_streams

__all__ = ["Clock", "EventClock", "HostClock", "clock_for"]


class Clock(Protocol):
    """Takes marks now and reads later, when nothing is delayed by it, at what time each was taken."""

    is_host: bool
    """Whether marks are the host's own time, so that a thread may take one when a collective completes."""

    def now(self) -> Any:
        """A mark for this moment (on an accelerator: for when the current stream comes to it)."""
        ...

    def settle(self) -> None:
        """Wait until every mark can be read."""
        ...

    def read_ms(self, mark: Any) -> float:
        """The time of a mark, in ms since the Unix epoch."""
        ...


class HostClock:
    """The host's monotonic clock, placed in the calendar once, so that marks of several machines can be compared."""

    is_host = True

    def __init__(self) -> None:
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    def now(self) -> int:
        return time.perf_counter_ns()

    def settle(self) -> None:
        """Every mark is a number already."""

    def read_ms(self, mark: int) -> float:
        return (mark + self._epoch_ns) / 1e6


class EventClock:
    """Events on the current stream: recording one queues it, and they are read when all is over."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._origin = self.now()
        # The one wait of the recording, before its first step: it ties the device's time to the host's.
        self._origin.synchronize()
        self._origin_ms = time.time_ns() / 1e6

    def now(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def settle(self) -> None:
        self._module.synchronize(self._device)

    def read_ms(self, mark: Any) -> float:
        elapsed_ms: float = self._origin.elapsed_time(mark)
        return self._origin_ms + elapsed_ms


def clock_for(device: torch.device) -> Clock:
    """The clock that sees what ``device`` does."""
    return EventClock(device) if has_streams(device) else HostClock()
