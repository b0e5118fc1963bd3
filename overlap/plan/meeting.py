"""Ranks exchange values and failures through the group's store, without a collective.

A rank that fails writes its error there; one that waits for values finds the error instead, and raises. So no rank
waits for a collective that another will never issue.
"""

from __future__ import annotations

import itertools
import json
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from overlap._torch.c10d import PrefixStore, group_store, group_timeout
from overlap.errors import CollectiveError, PeerError

__all__ = ["Meeting"]

_SHORTEST_S, _LONGEST_S = 0.0005, 0.02
_WORDS = 300
# After a connection broke, until the word of the rank that failed is there.
_PATIENCE_S = 1.0
# Every rank of a group meets as often as the others: the numbers agree.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()


class Meeting:
    """All ranks of ``group``, for as long as they have something to settle."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        number = next(_numbers.setdefault(group, itertools.count()))
        self.rank, self.ranks = group.rank(), group.size()
        self._store = PrefixStore(f"overlap/plan/{number}", group_store(group))
        self._timeout_s = group_timeout(group, device).total_seconds()
        self._labels = itertools.count()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within it, an exception is told to the other ranks before it goes on, and one that another rank caused is
        raised as :class:`PeerError`."""
        try:
            yield
        except PeerError:
            raise
        except BaseException as error:
            # This may be the effect of another rank's failure, whose own error says more.
            is_broken = type(error) in (RuntimeError, CollectiveError, dist.DistBackendError, dist.DistNetworkError)
            if is_broken and (words := self._failure_of_others(patience_s=_PATIENCE_S)):
                raise PeerError(words) from error
            self._store.set("failed", f"rank {self.rank}: {type(error).__name__}: {str(error)[:_WORDS]}")
            raise

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank; of what JSON can say.

        Raises:
            PeerError: another rank has failed.
            CollectiveError: another rank did not come within the group's timeout.
        """
        label = next(self._labels)
        self._store.set(f"{label}/{self.rank}", json.dumps(value))
        if self._store.add(f"{label}/came", 1) == self.ranks:
            self._store.set(f"{label}/all", "")
        self._wait_for(f"{label}/all")
        return [json.loads(self._store.get(f"{label}/{rank}")) for rank in range(self.ranks)]

    def from_first(self, value: Any) -> Any:
        """What rank 0 gives; the others' values are not read.

        Raises:
            PeerError: another rank has failed.
            CollectiveError: rank 0 did not come within the group's timeout.
        """
        label = next(self._labels)
        if self.rank == 0:
            self._store.set(f"{label}/first", json.dumps(value))
        self._wait_for(f"{label}/first")
        return json.loads(self._store.get(f"{label}/first"))

    def _wait_for(self, key: str) -> None:
        # Not store.wait, which would not see a failure.
        deadline_s = time.monotonic() + self._timeout_s
        pause_s = _SHORTEST_S
        while not self._store.check([key]):
            if words := self._failure_of_others():
                # A rank that has gone on from here and failed then has left what is waited for.
                if self._store.check([key]):
                    return
                raise PeerError(words)
            if time.monotonic() > deadline_s:
                raise CollectiveError(
                    f"rank {self.rank} waited {self._timeout_s:.0f} s for the other ranks in auto(): every rank of the "
                    "process group must call it"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_S)

    def _failure_of_others(self, *, patience_s: float = 0.0) -> str:
        """What a rank that has failed has left; nothing where there is none."""
        deadline_s = time.monotonic() + patience_s
        while not self._store.check(["failed"]):
            if time.monotonic() >= deadline_s:
                return ""
            time.sleep(_LONGEST_S)
        return f"another rank failed in auto(), {self._store.get('failed').decode()}"
