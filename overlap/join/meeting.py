"""Ranks that are about to issue collectives together, of which one may have made a mistake before."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from overlap._torch.c10d import Store, backend_name, group_timeout
from overlap._torch.stores import BoundedStore
from overlap.errors import CollectiveError, PeerError
from overlap.join.failures import FailureStore

__all__ = ["Meeting"]

_ASKING_S = (0.001, 0.1)

# How many meetings this process has had on a group: the same number on every rank, so it names their keys.
_had: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()


class Meeting:
    """Lets a mistake on one rank be an error on all, at once, where the others would wait for it in a collective::

        with Meeting(group, "ZeroRedundancyOptimizer") as meeting:
            ...  # May raise on this rank alone.
            meeting.come()
            ...  # Collectives.

    Issues no collective: ranks meet in the group's store.

    Args:
        group: whose ranks; all of them do this, in the same order with other meetings.
        what: is being made, for messages.
    """

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self._what, self._rank, self._size = what, group.rank(), group.size()
        self._timeout_s = group_timeout(group, torch.device("cpu")).total_seconds()
        self._is_held = self._size > 1 and _has_peers(group)
        self._has_come = False
        if self._is_held:
            key = f"meeting/{next(_had.setdefault(group, itertools.count()))}"
            self._store, self._failures = BoundedStore(group, f"overlap/{key}"), FailureStore(group, key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._is_held and not self._has_come:
            self._failures.report(error)

    def come(self) -> None:
        """Wait until all ranks have come.

        Raises:
            PeerError: another rank has raised before; the message has its number and its error.
            CollectiveError: another rank did not come within the group's timeout.
        """
        if not self._is_held or self._has_come:
            return
        self._has_come = True
        self._store.within(self._timeout_s, self._tell)
        deadline_s = time.monotonic() + self._timeout_s
        pause_s, longest_s = _ASKING_S
        while not self._store.within(self._timeout_s, lambda store: store.check(["all came"])):
            if (failure := self._failures.first()) is not None:
                raise PeerError(f"another rank failed where all make {self._what}: {failure}")
            if time.monotonic() > deadline_s:
                raise CollectiveError(
                    f"rank {self._rank} could not connect with the other ranks in {self._timeout_s:.0f} s: ranks "
                    f"{self._store.within(self._timeout_s, self._missing)} did not come to make {self._what}; every "
                    "rank of the process group must make the same, in the same order"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        self._store.within(self._timeout_s, self._leave)

    def _tell(self, store: Store) -> None:
        store.set(f"came/{self._rank}", "")
        if store.add("came", 1) == self._size:
            store.set("all came", "")

    def _missing(self, store: Store) -> list[int]:
        return [rank for rank in range(self._size) if not store.check([f"came/{rank}"])]

    def _leave(self, store: Store) -> None:
        if store.add("left", 1) == self._size:  # The last deletes what all have read.
            for key in ("came", "all came", "left", *(f"came/{rank}" for rank in range(self._size))):
                store.delete_key(key)


def _has_peers(group: dist.ProcessGroup) -> bool:
    """Whether other processes are behind ``group``: not where a test pretends so."""
    names = {backend_name(group, torch.device(device)) for device in ("cpu", "cuda")}
    return bool(names & {"gloo", "nccl"})
