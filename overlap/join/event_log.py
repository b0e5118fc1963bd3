"""What active ranks do, written down for the ranks that have run out of inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import torch.distributed as dist

from overlap.join.board import Board

__all__ = ["Cursor", "Event", "EventKind", "EventLog"]

_END, _AFTER_END = "the end of Join", "what follows Join"
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

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self.board = Board(group, f"join/{name}", event="failed under Join")
        self._events = 0

    def write(self, position: Position, event: Event) -> None:
        """Write ``event``; delete old ones."""
        self.board.write(_key(position), [event.iteration, event.kind, event.joinable, event.detail])
        self._events += 1
        if self._events % _KEPT_EVENTS == 0:
            self.board.delete(kept=_KEPT_EVENTS)

    def read(self, position: Position) -> Event:
        """Wait for the event at ``position``.

        Raises:
            PeerError: another rank failed.
            CollectiveError: nothing was written within the group's timeout.
        """
        ((iteration, kind, joinable, detail),) = self.board.read([_key(position)], late=self._late)
        return Event(iteration, EventKind(kind), joinable, detail)

    def _late(self, missing: object) -> str:
        return (
            f"rank {self.board.rank} waited {self.board.timeout.total_seconds():.0f} s for the ranks that still have "
            "inputs to go on, and no rank has reported an error"
        )

    def exchange(self, what: str, value: Any) -> list[Any]:
        """The ``value`` of every rank, in the order of ranks. Waits until all ranks have called this.

        Raises:
            PeerError: another rank failed.
            CollectiveError: a rank did not come within the group's timeout.
        """
        return self.board.gather(what, value, purpose=f" to {what}")

    def exchange_at_end(self, value: Any) -> list[Any]:
        """As :meth:`exchange`, the last of all. Rank 0 returns when all have the values: it may host the store."""
        found = self.exchange(_END, value)
        if self.board.rank == 0:
            self.exchange(_AFTER_END, None)
        else:
            self.board.write(f"{_AFTER_END}/{self.board.rank}", None)
        return found


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
