"""What active ranks do, written down for the ranks that have run out of inputs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, NamedTuple

import torch.distributed as dist

from overlap._torch.c10d import PrefixStore, group_store
from overlap.errors import CollectiveError, PeerError
from overlap.join.failures import FailureStore

__all__ = ["Cursor", "Event", "EventKind", "EventLog"]

# How long to wait before looking whether another rank has reported a failure.
_CHECK_FAILURES_EVERY_S = 1.0
# Events that stay readable. The host cannot run further ahead than this of ranks that replay them.
_KEPT_EVENTS = 4096


class EventKind(StrEnum):
    """What a rank that has joined does at an event."""

    CALL = "call"
    """Replays a forward, a ``step()`` or another call on a joinable."""

    BACKWARD = "backward"
    """Reduces gradients of zero."""

    POLL = "poll"
    """Takes part in the all-reduce that says who has inputs."""

    END = "end"
    """Stops replaying: every rank has run out."""


@dataclass(frozen=True)
class Event:
    """One thing that active ranks do: in which iteration, to which joinable (by its index), and with what."""

    iteration: int
    kind: EventKind
    joinable: int = -1
    detail: Any = None


class Position(NamedTuple):
    """Where an event stands in the log."""

    counted: int
    """How many events come before it, without backwards: every active rank counts them."""

    backwards: int
    """How many backwards come between the last of those and it: only a rank that writes needs to count them."""

    def after(self, event: Event) -> Position:
        """The position that follows ``event``, which stands here."""
        if event.kind is EventKind.BACKWARD:
            return Position(self.counted, self.backwards + 1)
        return Position(self.counted + 1, 0)


class EventLog:
    """A list of events in the store that ``group`` was made with. No collective; only ranks that read it wait.

    All active ranks count the events, and one of them writes. A rank that joins has counted the same events, so it
    knows the position from which to read on.
    """

    def __init__(self, group: dist.ProcessGroup, key: str, timeout: timedelta) -> None:
        self._store = PrefixStore(f"overlap/join/{key}", group_store(group))
        self._rank, self._size = group.rank(), group.size()
        self._timeout_s = timeout.total_seconds()
        self._written: list[str] = []
        self.failures = FailureStore(group, f"join/{key}")

    def write(self, position: Position, event: Event) -> None:
        """Write ``event``; delete old ones."""
        key = _key(position)
        self._store.set(key, json.dumps([event.iteration, event.kind, event.joinable, event.detail]))
        self._written.append(key)
        if len(self._written) == 2 * _KEPT_EVENTS:
            old, self._written = self._written[:_KEPT_EVENTS], self._written[_KEPT_EVENTS:]
            for each in old:
                self._store.delete_key(each)

    def read(self, position: Position) -> Event:
        """Wait for the event at ``position``.

        Raises:
            PeerError: another rank failed.
            CollectiveError: nothing was written within the group's timeout.
        """
        key = _key(position)
        self._wait([key], "the ranks that still have inputs to go on")
        iteration, kind, joinable, detail = json.loads(self._store.get(key))
        return Event(iteration, EventKind(kind), joinable, detail)

    def exchange(self, what: str, value: Any) -> list[Any]:
        """The ``value`` of every rank, in the order of ranks. Waits until all ranks have called this.

        Raises:
            PeerError: another rank failed.
            CollectiveError: a rank did not come within the group's timeout.
        """
        self._store.set(f"{what}/{self._rank}", json.dumps(value))
        keys = [f"{what}/{rank}" for rank in range(self._size)]
        self._wait(keys, f"every rank to come to {what}")
        return [json.loads(self._store.get(key)) for key in keys]

    def _wait(self, keys: Sequence[str], reason: str) -> None:
        start_s = time.monotonic()
        while True:
            try:
                self._store.wait(list(keys), timedelta(seconds=_CHECK_FAILURES_EVERY_S))
                return
            except RuntimeError as error:
                if (failure := self.failures.read()) is not None:
                    raise PeerError(f"another rank failed under Join: {failure}") from None
                waited_s = time.monotonic() - start_s
                if waited_s > self._timeout_s:
                    missing = [key for key in keys if not self._store.check([key])]
                    ranks = [int(key.rpartition("/")[2]) for key in missing] if len(keys) > 1 else "none"
                    raise CollectiveError(
                        f"rank {self._rank} waited {waited_s:.0f} s for {reason}; missing ranks: {ranks}"
                    ) from error


class Cursor:
    """One rank's position in an :class:`EventLog`: an active rank moves it by appending, a joined one by reading.

    Every active rank appends; an event is written by the rank whose ``is_writer()`` is true when it is due.
    """

    def __init__(self, log: EventLog, is_writer: Callable[[], bool]) -> None:
        self._log, self._is_writer = log, is_writer
        self._position = Position(0, 0)
        self._delayed: list[tuple[Position, Event]] = []

    @property
    def count(self) -> int:
        """How many events have been appended or read, without backwards."""
        return self._position.counted

    def append(self, event: Event, *, delay_write: bool = False) -> None:
        """Append ``event``.

        Args:
            event: what this rank is about to do.
            delay_write: write it with the next event, since the rank that writes may not be known earlier.
        """
        self.flush()
        self._delayed.append((self._position, event))
        self._position = self._position.after(event)
        if not delay_write:
            self.flush()

    def flush(self) -> None:
        """Write what was delayed."""
        delayed, self._delayed = self._delayed, []
        for position, event in delayed:
            if self._is_writer():
                self._log.write(position, event)

    def read(self) -> Event:
        """Wait for the next event of another rank. Raises: as :meth:`EventLog.read`."""
        event = self._log.read(self._position)
        self._position = self._position.after(event)
        return event


def _key(position: Position) -> str:
    return f"{position.counted}/{position.backwards}"
