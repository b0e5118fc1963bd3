"""Which processes are alive: each counts in a store, and the others see when it no longer does."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from overlap._threads import start
from overlap._torch.c10d import Store
from overlap._torch.stores import BoundedStore, own_connection, peek
from overlap.join.processes import has_ended, this_process

__all__ = ["About", "Heartbeat", "Liveness", "beat_key"]

# So many beats may be missed.
_BEATS = 5
_LEAVING_S = 1.0
# How long what was found holds, at least, and for each process.
_LOOKING_S = 0.02
_LOOKING_AT_EACH_S = 0.0025


def beat_key(number: int) -> str:
    """Where process ``number`` counts."""
    return f"beat/{number}"


@dataclass(frozen=True, kw_only=True)
class About:
    """What a process tells of itself."""

    process: list[str]
    """What tells it from others on the same machine, as :func:`this_process` says."""

    host: str
    step: int
    """The step that it is at."""

    @classmethod
    def this(cls, step: int) -> About:
        """This process."""
        return cls(process=this_process(), host=socket.gethostname(), step=step)

    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> About:
        return cls(**json.loads(text))


class Heartbeat:
    """A thread that counts in ``store`` until it is stopped, by a connection of its own.

    Args:
        store: the store.
        prefix: of its keys.
        number: of this process.
        silent_after_s: after so long without a beat others take a process for lost.
    """

    def __init__(self, store: Store, prefix: str, number: int, silent_after_s: float) -> None:
        self._store = BoundedStore(own_connection(store), prefix, shares_thread=False)
        self._key = beat_key(number)
        self._every_s = silent_after_s / _BEATS
        self._ending = threading.Event()
        self._thread = start(self._run, "overlap-heartbeat", stop=self._ending.set)

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            # A store that does not answer is an error where this process needs an answer.
            with contextlib.suppress(RuntimeError):
                self._store.within(self._every_s, lambda store: store.add(self._key, 1))

    def stop(self) -> None:
        """Stop counting."""
        self._ending.set()
        self._thread.join(_LEAVING_S)


class Liveness:
    """Says which processes are lost: they have left, ended (on this machine), or not counted for a while.

    By the clock of this process alone: others are silent if their count does not change while this one looks on, or
    since it last looked.
    """

    def __init__(self, silent_after_s: float) -> None:
        self._silent_after_s = silent_after_s
        self._about: dict[int, About] = {}
        self._counts: dict[int, tuple[int, float]] = {}
        self._gone: dict[int, str] = {}
        self._found: dict[int, tuple[str | None, float]] = {}

    def about(self, store: Store, number: int) -> About | None:
        """What process ``number`` has told of itself, if it has."""
        if number not in self._about and (text := peek(store, f"process/{number}")) is not None:
            self._about[number] = About.of(text)
        return self._about.get(number)

    def lost(self, store: Store, numbers: Iterable[int]) -> dict[int, str]:
        """Those of ``numbers`` that are lost, and why; looks no more often than makes sense."""
        asked = sorted(set(numbers))
        now_s, every_s = time.monotonic(), max(_LOOKING_S, _LOOKING_AT_EACH_S * len(asked))
        for number in asked:
            if now_s - self._found.get(number, (None, float("-inf")))[1] > every_s:
                self._found[number] = self._why(store, number), now_s
        return {number: why for number in asked if (why := self._found[number][0]) is not None}

    def why(self, number: int) -> str:
        """Why process ``number`` was found lost, as far as is known."""
        return self._found.get(number, (None, 0.0))[0] or f"process {number} is lost"

    def is_gone(self, number: int) -> bool:
        """Whether a process that was found lost cannot come back: it is not only silent."""
        return number in self._gone

    def _why(self, store: Store, number: int) -> str | None:
        if number in self._gone:
            return self._gone[number]
        # Before the count is read: if this process is stopped in between, the time says less, not more.
        now_s = time.monotonic()
        count = store.add(beat_key(number), 0)
        if self._counts.get(number, (None, now_s))[0] != count:
            self._counts[number] = count, now_s
        about = self.about(store, number)
        where = f"process {number}" + ("" if about is None else f" on {about.host}")
        if (reason := peek(store, f"left/{number}")) is not None:
            self._gone[number] = f"{where} has left{reason and f' ({reason})'}"
        elif about is not None and has_ended(about.process):
            self._gone[number] = f"{where} has ended"
        elif now_s - self._counts[number][1] > self._silent_after_s:
            return f"{where} has given no sign of life for {self._silent_after_s:g} s"
        return self._gone.get(number)
