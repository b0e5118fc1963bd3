"""How ranks tell each other that they failed."""

from __future__ import annotations

import contextlib
import weakref

import torch.distributed as dist

from overlap._torch.c10d import PrefixStore, group_store
from overlap.join.active import active_join

__all__ = ["FailureStore"]


class FailureStore:
    """Where a rank writes that it failed, for the others to read when a collective does not complete.

    Each set of channels, and each Join, has one of its own, in the store that the process group was made with.
    """

    def __init__(self, group: dist.ProcessGroup, key: str) -> None:
        self._store = PrefixStore(f"overlap/failures/{key}", group_store(group))
        self._rank = group.rank()
        self._group = weakref.ref(group)

    def report(self, error: BaseException) -> None:
        """Tell the group that this rank failed. Never raises: the error itself matters more."""
        with contextlib.suppress(Exception):
            place = self._store.add("failures", 1)
            self._store.set(f"failure/{place}", f"rank {self._rank}: {_one_line(error)}")

    def first(self) -> str | None:
        """The first failure that a rank reported here, with the number of the rank."""
        with contextlib.suppress(Exception):
            return self._first()
        return None

    def read(self) -> str | None:
        """As :meth:`first`; where there is none, the first in the group's active Join."""
        with contextlib.suppress(Exception):
            return self.look()
        return None

    def look(self) -> str | None:
        """As :meth:`read`, but it raises where the store cannot be read."""
        if (failure := self._first()) is not None:
            return failure
        group = self._group()
        join = None if group is None else active_join(group)
        return None if join is None else join.failure()

    def _first(self) -> str | None:
        return self._store.get("failure/1").decode() if self._store.check(["failure/1"]) else None

    def agree(self, signature: str) -> str | None:
        """Compare ``signature`` with rank 0's: ``None`` where they are equal, else rank 0's."""
        if self._rank == 0:
            self._store.set("signature", signature)
            return None
        reference = self._store.get("signature").decode()
        return None if reference == signature else reference


def _one_line(error: BaseException) -> str:
    notes = " ".join(getattr(error, "__notes__", ()))
    return " ".join(f"{type(error).__name__}: {error} {notes}".split())
