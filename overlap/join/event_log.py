"""What active ranks do, written down for the ranks that have run out of inputs."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any, NamedTuple

import torch.distributed as dist

from overlap._torch.c10d import Store
from overlap._torch.stores import BoundedStore, host_has_ended, peek
from overlap.errors import CollectiveError, PeerError
from overlap.join.failures import FailureStore
from overlap.join.leftovers import leave, release
from overlap.join.processes import ended_in_words

__all__ = ["Cursor", "Event", "EventKind", "EventLog"]

# How long to wait before looking whether another rank has reported a failure.
_CHECK_FAILURES_EVERY_S = 0.25
# How long to wait before asking again, at first and at last: other ranks wait for one that replays.
_ASKING_S = (0.0005, 0.01)
# How long the store may take to say that nothing is there.
_ANSWERING_S = 1.0
_END, _AFTER_END = "the end of Join", "what follows Join"
_SOMEBODY_LEFT = "left/somebody"
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
        self._prefix = f"overlap/join/{key}"
        self._store = BoundedStore(group, self._prefix)
        self._rank, self._size = group.rank(), group.size()
        self._timeout_s = timeout.total_seconds()
        self._written: list[str] = []
        self._exchanged: list[str] = []
        self.processes: list[list[str]] = []
        """Those of all ranks, when they have told each other."""
        self.failures = FailureStore(group, f"join/{key}")

    def write(self, position: Position, event: Event) -> None:
        """Write ``event``, without waiting until it is there; delete old ones."""
        key = _key(position)
        text = json.dumps([event.iteration, event.kind, event.joinable, event.detail])
        self._store.post(self._timeout_s, lambda store: store.set(key, text))
        self._written.append(key)
        if len(self._written) == 2 * _KEPT_EVENTS:
            old, self._written = self._written[:_KEPT_EVENTS], self._written[_KEPT_EVENTS:]
            self._delete(old)

    def _delete(self, keys: Sequence[str]) -> None:
        def delete(store: Store) -> None:
            for key in keys:
                store.delete_key(key)

        self._store.within(self._timeout_s, delete)

    def release(self, group: dist.ProcessGroup) -> None:
        """Take note that this rank reads nothing here any more: its block is over. See [Note: keys left behind]."""
        self.failures.release()
        release(group, self._prefix, self._leave)

    def _leave(self, store: Store) -> None:
        # The last rank to leave deletes what each has written.
        store.set(f"written/{self._rank}", json.dumps([*self._written, *self._exchanged]))

        def keys() -> Iterator[str]:
            for told in (f"written/{rank}" for rank in range(self._size)):
                yield from json.loads(store.get(told))
                yield told

        leave(store, size=self._size, keys=keys())

    def read(self, position: Position) -> Event:
        """Wait for the event at ``position``.

        Raises:
            PeerError: another rank failed.
            CollectiveError: nothing was written within the group's timeout.
        """
        (text,) = self._wait([_key(position)], "the ranks that still have inputs to go on")
        iteration, kind, joinable, detail = json.loads(text)
        return Event(iteration, EventKind(kind), joinable, detail)

    def exchange(self, what: str, value: Any) -> list[Any]:
        """The ``value`` of every rank, in the order of ranks. Waits until all ranks have called this.

        Raises:
            PeerError: another rank failed.
            CollectiveError: a rank did not come within the group's timeout.
        """
        self._say(what, value)
        return self._said_by_all(what)

    def _say(self, what: str, value: Any) -> None:
        own, text = f"{what}/{self._rank}", json.dumps(value)
        self._store.within(self._timeout_s, lambda store: store.set(own, text))
        self._exchanged.append(own)

    def _said_by_all(self, what: str) -> list[Any]:
        keys = [f"{what}/{rank}" for rank in range(self._size)]
        return [json.loads(text) for text in self._wait(keys, f"every rank to come to {what}")]

    def exchange_at_end(self, value: Any) -> list[Any]:
        """As :meth:`exchange`, the last of all. Rank 0 returns when all have the values: it may host the store."""
        told = self.exchange(_END, value)
        self._say(_AFTER_END, None)
        if self._rank == 0:
            self._said_by_all(_AFTER_END)
        return told

    def say_left(self, issued: int) -> None:
        """Tell the others that this rank leaves with an error, having ``issued`` so many collectives. Never raises."""
        own = _left(self._rank)
        self._exchanged += [own, _SOMEBODY_LEFT]

        def tell(store: Store) -> None:
            store.set(own, str(issued))
            store.set(_SOMEBODY_LEFT, "")

        with contextlib.suppress(Exception):
            self._store.tell(_ANSWERING_S, tell)

    def is_left_behind(self, issued: int) -> bool:
        """Whether a rank has left with an error when it had issued fewer collectives than ``issued``."""

        def ask(store: Store) -> list[str | None]:
            if peek(store, _SOMEBODY_LEFT) is None:
                return []
            return [peek(store, _left(rank)) for rank in range(self._size) if rank != self._rank]

        with contextlib.suppress(Exception):
            return any(said is not None and int(said) < issued for said in self._store.within(_ANSWERING_S, ask))
        return False

    def _wait(self, keys: list[str], reason: str) -> list[bytes]:
        """What is written under ``keys``."""
        start_s = looked_s = time.monotonic()

        def read(store: Store) -> list[bytes] | None:
            return [store.get(key) for key in keys] if store.check(keys) else None

        while True:
            error: RuntimeError = CollectiveError("nothing was written in time")
            try:
                if (found := self._store.within(_ANSWERING_S, read)) is not None:
                    return found
            except RuntimeError as raised:
                error, looked_s = raised, -math.inf
            now_s = time.monotonic()
            waited_s = now_s - start_s
            if now_s - looked_s > _CHECK_FAILURES_EVERY_S:
                self._look(error, is_over=waited_s > self._timeout_s, what=f"waited {waited_s:.0f} s for {reason}")
                looked_s = now_s
            shortest_s, longest_s = _ASKING_S
            time.sleep(min(shortest_s + waited_s / 10, longest_s))

    def _look(self, error: RuntimeError, *, is_over: bool, what: str) -> None:
        """Called when what this rank waits for has not come. Raises: PeerError, CollectiveError: it will not."""
        if (failure := self.failures.first()) is not None:
            raise PeerError(f"another rank failed under Join: {failure}") from None
        if (ended := self.ended_in_words()) is not None:
            raise CollectiveError(f"rank {self._rank} {what}; {ended}") from error
        if host_has_ended(error):
            raise CollectiveError(
                f"rank {self._rank} {what}; rank 0 of the job, which hosts the process group's store, has ended"
            ) from error
        # Ranks with inputs are in touch with each other, and notice it when one of them ends.
        if not (is_over or self.failures.somebody_stopped()):
            return
        lost = self.failures.lost_in_words()
        if (failure := self.failures.first()) is not None:
            raise PeerError(f"another rank failed under Join: {failure}") from None
        raise CollectiveError(f"rank {self._rank} {what}; {lost}: {error}") from error

    def ended_in_words(self) -> str | None:
        """Which ranks' processes have ended, for a message; ``None`` where none is known to have."""
        return ended_in_words(self.processes)


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


def _left(rank: int) -> str:
    return f"left/{rank}"


def _key(position: Position) -> str:
    return f"{position.counted}/{position.backwards}"
