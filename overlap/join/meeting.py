"""Ranks that are about to issue collectives together, of which one may have made a mistake before."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from enum import Enum, auto
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from overlap._torch.c10d import Store, backend_name, group_timeout
from overlap._torch.stores import BoundedStore, host_has_ended, peek
from overlap.errors import CollectiveError, PeerError
from overlap.join.failures import FailureStore
from overlap.join.leftovers import leave, leave_released, release
from overlap.join.processes import ended_in_words, this_process

__all__ = ["Meeting", "meet"]

_ASKING_S = (0.001, 0.1)
# How long to wait before looking whether the process of another rank has ended.
_LOOKING_S = 0.25

# How many meetings this process has had on a group: the same number on every rank, so it names their keys.
_had: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
# Those of all ranks, once they have met.
_processes: WeakKeyDictionary[dist.ProcessGroup, list[list[str]]] = WeakKeyDictionary()


class _Phase(Enum):
    """Where this rank stands, in this order."""

    APART = auto()
    """It may still find a mistake of its own, and then tells the others, who wait for it."""

    WAITING = auto()
    """It has come. What it raises now another rank knows, or has caused."""

    TOGETHER = auto()
    """All have come, and read what was told."""


class Meeting:
    """Lets a mistake on one rank be an error on all, at once, where the others would wait for it in a collective::

        with Meeting(group, "make a ZeroRedundancyOptimizer") as meeting:
            ...  # May raise on this rank alone.
            meeting.come()
            ...  # Collectives.

    Issues no collective: ranks meet in the group's store. Those that meet for different purposes are told of it there.

    Args:
        group: whose ranks; all of them do this, in the same order with other meetings.
        purpose: what all are about to do, for messages.
    """

    def __init__(self, group: dist.ProcessGroup, purpose: str) -> None:
        self._group, self._purpose, self._rank, self._size = group, purpose, group.rank(), group.size()
        self._timeout_s = group_timeout(group, torch.device("cpu")).total_seconds()
        self._phase = _Phase.APART if self._size > 1 else _Phase.TOGETHER
        self.key = f"meeting/{next(_had.setdefault(group, itertools.count()))}"
        """What no other meeting of the group has."""
        self.processes: list[list[str]] = _processes.get(group, [])
        """Of each rank, what tells it from others on its machine; empty before the first meeting of the group."""
        self._prefix = f"overlap/{self.key}"

    @cached_property
    def _store(self) -> BoundedStore:
        return BoundedStore(self._group, self._prefix)

    @cached_property
    def _failures(self) -> FailureStore:
        return FailureStore(self._group, self.key)

    def __enter__(self) -> Self:
        leave_released(self._group)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or self._phase is _Phase.TOGETHER or not _has_peers(self._group):
            return
        if self._phase is _Phase.APART:
            self._failures.report(error)
        self._failures.release()
        release(self._group, self._prefix, partial(_leave, self._size))

    def come(self, value: Any = None) -> list[Any]:
        """Wait until all ranks have come, each with a ``value`` that JSON can hold; returns that of every rank.

        A second call does nothing, and so does one where there are no other ranks: there is only this rank's value.

        Raises:
            PeerError: another rank has raised before; the message has its number and its error.
            CollectiveError: another rank comes for another purpose, or did not come within the group's timeout.
        """
        if self._phase is _Phase.APART and _has_peers(self._group):
            return self.exchange(value)
        return [value]

    def exchange(self, value: Any) -> list[Any]:
        """:meth:`come` with a ``value`` that JSON can hold; returns that of every rank, in the order of ranks."""
        if self._phase is _Phase.TOGETHER:
            return [value]
        self._phase = _Phase.WAITING
        try:
            found = self._met(value)
        except RuntimeError as error:
            if not host_has_ended(error):
                raise
            raise CollectiveError(
                f"rank {self._rank} was about to {self._purpose}, but rank 0 of the job, which hosts the process "
                "group's store, has ended"
            ) from error
        self._phase = _Phase.TOGETHER
        return found

    def _met(self, value: Any) -> list[Any]:
        text = json.dumps([value, this_process()])
        self._compare(self._store.within(self._timeout_s, lambda store: self._tell(store, text)))
        began_s = looked_s = time.monotonic()
        pause_s, longest_s = _ASKING_S
        while not self._have_all_come():
            if (failure := self._failures.first()) is not None:
                raise PeerError(f"another rank failed where all {self._purpose}: {failure}")
            now_s = time.monotonic()
            if now_s - looked_s > _LOOKING_S:
                self._look(is_over=now_s - began_s > self._timeout_s)
                looked_s = now_s
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        read = self._store.within(self._timeout_s, self._read)
        self.processes = _processes[self._group] = [process for _, process in read]
        return [told for told, _ in read]

    def _have_all_come(self) -> bool:
        return self._store.within(self._timeout_s, lambda store: store.check(["all came"]))

    def _look(self, *, is_over: bool) -> None:
        """Called while ranks are missing. Raises: CollectiveError: they will not come."""
        # A rank that was the last to come may have ended since.
        if (ended := ended_in_words(self.processes)) is not None and not self._have_all_come():
            raise CollectiveError(f"rank {self._rank} was about to {self._purpose}, but {ended}")
        if is_over:
            raise CollectiveError(
                f"rank {self._rank} could not connect with the other ranks in {self._timeout_s:.0f} s: ranks "
                f"{self._store.within(self._timeout_s, self._missing)} did not come to {self._purpose}; every "
                "rank of the process group must do the same, in the same order"
            )

    def _tell(self, store: Store, text: str) -> str:
        """Come; returns what the rank that came first is about to do, after its number."""
        first = store.compare_set("first", "", f"{self._rank} {self._purpose}").decode()
        store.set(f"came/{self._rank}", text)
        if first.partition(" ")[2] == self._purpose and store.add("came", 1) == self._size:
            store.set("all came", "")
        return first

    def _compare(self, first: str) -> None:
        rank, _, purpose = first.partition(" ")
        if purpose == self._purpose:
            return
        error = CollectiveError(
            f"rank {self._rank} is about to {self._purpose}, and rank {rank} to {purpose}: every rank of the process "
            "group must do the same, in the same order"
        )
        self._failures.report(error)
        raise error

    def _missing(self, store: Store) -> list[int]:
        return [rank for rank in range(self._size) if peek(store, f"came/{rank}") is None]

    def _read(self, store: Store) -> list[Any]:
        found = [json.loads(store.get(f"came/{rank}")) for rank in range(self._size)]
        _leave(self._size, store)
        return found


def meet(group: dist.ProcessGroup, purpose: str) -> None:
    """Wait until all ranks of ``group`` have come for this ``purpose``. Raises: as :meth:`Meeting.come`."""
    with Meeting(group, purpose) as meeting:
        meeting.come()


def _leave(size: int, store: Store) -> None:
    leave(store, size=size, keys=("first", "came", "all came", *(f"came/{rank}" for rank in range(size))))


def _has_peers(group: dist.ProcessGroup) -> bool:
    """Whether other processes are behind ``group``: not where a test pretends so."""
    names = {backend_name(group, torch.device(device)) for device in ("cpu", "cuda")}
    return bool(names & {"gloo", "nccl"})
