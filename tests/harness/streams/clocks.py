"""Who has waited for what: vector clocks of streams, events and the host.

A *timeline* is something that does one thing after the other: a stream, or the host. It numbers its accesses to memory
and knows, of every other timeline, up to which number that one is done before whatever comes next here. An event is a
copy of that knowledge; to wait for it is to take it over.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch

Frame = tuple[str, int, str]
Moment = dict["Timeline", int]

_ROOT = str(Path(__file__).resolve().parents[3])
_INSIDE = (f"{_ROOT}/overlap/", f"{_ROOT}/tests/")
_NOT_OURS = str(Path(__file__).resolve().parent)
_FRAMES = 6


def frames_of_interest() -> tuple[Frame, ...]:
    """Where the caller is, innermost first: frames of the library and of its tests alone, as file, line and name."""
    found: list[Frame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < _FRAMES:
        if (path := _path(frame.f_code)) is not None:
            found.append((path, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


@functools.cache
def _path(code: CodeType) -> str | None:
    """The file in the library or its tests; ``None`` for others and for this package."""
    path = code.co_filename
    return path[len(_ROOT) + 1 :] if path.startswith(_INSIDE) and not path.startswith(_NOT_OURS) else None


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """One operation on a timeline, as what it reads and writes remembers it."""

    timeline: Timeline
    time: int
    what: str
    stack: tuple[Frame, ...]

    def __str__(self) -> str:
        lines = [f"{self.what} on {self.timeline}"]
        return "\n".join([*lines, *(f"    {path}:{line} in {name}" for path, line, name in self.stack)])


class Timeline:
    """What happens in order. ``seen`` says up to which time others are done before what comes next here."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.now = 0
        self.seen: Moment = {}
        self.changes = 0
        """How often it has waited for something."""

    def __str__(self) -> str:
        return self.name

    def present(self) -> Moment:
        """All that is done when this timeline is done with what it has so far."""
        return {**self.seen, self: self.now}

    def join(self, moment: Moment) -> None:
        """What comes next here comes after ``moment``."""
        seen = self.seen
        for timeline, time in moment.items():
            if timeline is not self and seen.get(timeline, 0) < time:
                seen[timeline] = time
        self.changes += 1

    def is_after(self, access: Access) -> bool:
        """Whether what comes next here comes after ``access``."""
        return access.timeline is self or self.seen.get(access.timeline, 0) >= access.time


class Stream(Timeline):
    """Stands for a stream of a device: has those methods of :class:`torch.cuda.Stream` that the library calls.

    Args:
        name: its name in reports.
        device: its device.
        host: the timeline that queues work on it.
    """

    def __init__(self, name: str, device: torch.device, host: Host) -> None:
        super().__init__(name)
        self.device = device
        self._host = host
        self._host_changes = 0

    def advance(self) -> int:
        """The time of a new operation. What the host has waited for is done before all that it queues from then on."""
        if self._host.changes != self._host_changes:
            self._host_changes = self._host.changes
            self.join(self._host.seen)
        self.seen[self._host] = self._host.now
        self.now += 1
        return self.now

    def wait_stream(self, stream: Stream) -> None:
        self.join(stream.present())

    def wait_event(self, event: Event) -> None:
        if event.moment is not None:  # As on a device, one that was never recorded is not waited for.
            self.join(event.moment)


class Host(Timeline):
    """The thread that queues work on streams.

    Args:
        on_synchronize: called with a description when the host waits for a stream.
    """

    def __init__(self, on_synchronize: Callable[[str], None]) -> None:
        super().__init__("the host")
        self._thread = threading.get_ident()
        self._on_synchronize = on_synchronize

    def advance(self) -> int:
        """The time of a new operation."""
        self.now += 1
        return self.now

    def synchronize(self, what: str, moment: Moment) -> None:
        """Block until ``moment``."""
        if self._is_here:
            self._on_synchronize(what)
            self.join(moment)

    def join(self, moment: Moment) -> None:
        if self._is_here:
            super().join(moment)

    @property
    def _is_here(self) -> bool:
        """Whether the calling thread is the one that queues work; it does not know what others have waited for."""
        return threading.get_ident() == self._thread


class Event:
    """Stands for an event of a device: has those methods of :class:`torch.cuda.Event` that the library calls."""

    def __init__(self, host: Host, current_stream: Callable[[], Stream]) -> None:
        self.moment: Moment | None = None
        self._host = host
        self._current_stream = current_stream

    def record(self, stream: Stream | None = None) -> None:
        self.moment = (stream or self._current_stream()).present()

    def synchronize(self) -> None:
        if self.moment is not None:
            self._host.synchronize("event.synchronize()", self.moment)
