"""What active ranks do, written down for those that have joined."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from overlap._torch.c10d import PrefixStore, group_store
from overlap.errors import CollectiveError, PeerError
from overlap.join.failures import FailureStore

__all__ = ["Entry", "Script", "Trail"]

# How long to wait before looking whether another rank has reported a failure.
_PATIENCE_S = 1.0
# Entries that stay readable. The host cannot run further ahead than this of ranks that take part in what is written.
_KEPT = 4096


@dataclass(frozen=True)
class Entry:
    """One thing that active ranks do."""

    iteration: int
    kind: str
    member: int = -1
    detail: Any = None


class Script:
    """A list of entries in the store that ``group`` was made with: no collective, and only those who read it wait.

    Every active rank counts the entries, one of them writes. An entry has a place of two numbers: of *acts*, which all
    active ranks count, and of what follows the act and only the writer counts. A rank that joins knows its own
    place and reads on from there.
    """

    def __init__(self, group: dist.ProcessGroup, key: str, timeout: timedelta) -> None:
        self._store = PrefixStore(f"overlap/join/{key}", group_store(group))
        self._rank, self._size = group.rank(), group.size()
        self._timeout_s = timeout.total_seconds()
        self._written: list[str] = []
        self.failures = FailureStore(group, f"join/{key}")

    def write(self, act: int, after: int, entry: Entry) -> None:
        """Write the entry that comes ``after`` so many others behind ``act``."""
        place = f"{act}/{after}"
        self._store.set(place, json.dumps([entry.iteration, entry.kind, entry.member, entry.detail]))
        self._written.append(place)
        if len(self._written) == 2 * _KEPT:
            old, self._written = self._written[:_KEPT], self._written[_KEPT:]
            for each in old:
                self._store.delete_key(each)

    def read(self, act: int, after: int) -> Entry:
        """Wait for an entry.

        Raises:
            PeerError: another rank failed.
            CollectiveError: nothing was written in the group's timeout.
        """
        place = f"{act}/{after}"
        self._wait([place], "the ranks that still have inputs to go on")
        return Entry(*json.loads(self._store.get(place)))

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Every rank's ``value``, in ranks' order, once all have called this.

        Raises:
            PeerError: another rank failed.
            CollectiveError: a rank did not come in the group's timeout.
        """
        self._store.set(f"{what}/{self._rank}", json.dumps(value))
        keys = [f"{what}/{rank}" for rank in range(self._size)]
        self._wait(keys, f"every rank to come to {what}")
        return [json.loads(self._store.get(key)) for key in keys]

    def _wait(self, keys: Sequence[str], reason: str) -> None:
        start_s = time.monotonic()
        while True:
            try:
                self._store.wait(list(keys), timedelta(seconds=_PATIENCE_S))
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


class Trail:
    """One rank's way through a script: it puts entries while it is active, and reads on from there when it has joined.

    Every active rank counts; what it puts is written where ``is_writer()`` says so when the entry is due.
    """

    def __init__(self, script: Script, is_writer: Callable[[], bool]) -> None:
        self.acts = 0
        self._after = 0
        self._script, self._is_writer = script, is_writer
        self._held: list[tuple[int, int, Entry]] = []

    def put(self, entry: Entry, *, may_wait: bool = False) -> None:
        """Put an act. One that ``may_wait`` is due with the next entry: who writes may not be known earlier."""
        self.flush()
        self._held.append((self.acts, self._after, entry))
        self.acts, self._after = self.acts + 1, 0
        if not may_wait:
            self.flush()

    def put_after(self, entry: Entry) -> None:
        """Put what follows the last act, and what not every rank counts."""
        self._held.append((self.acts, self._after, entry))
        self._after += 1
        self.flush()

    def flush(self) -> None:
        """Write what is due."""
        held, self._held = self._held, []
        for act, after, entry in held:
            if self._is_writer():
                self._script.write(act, after, entry)

    def read(self, uncounted: str) -> Entry:
        """The next entry of another rank; those of kind ``uncounted`` follow an act. Raises: as :meth:`Script.read`."""
        entry = self._script.read(self.acts, self._after)
        if entry.kind == uncounted:
            self._after += 1
        else:
            self.acts, self._after = self.acts + 1, 0
        return entry
