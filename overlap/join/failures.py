"""How ranks tell each other that they failed."""

from __future__ import annotations

import contextlib
import weakref

import torch.distributed as dist

from overlap._torch.c10d import PrefixStore, group_store
from overlap.join.in_force import in_force

__all__ = ["FailureStore"]


class FailureStore:
    """Where a rank writes that it failed, for the others to read when a collective does not come back.

    One failures serves one set of channels, or one Join; it lives in the store that the process group was made with.
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

    def read(self) -> str | None:
        """The first failure that a rank of the group reported here or under the Join in force, its rank named."""
        with contextlib.suppress(Exception):
            if self._store.check(["failure/1"]):
                return self._store.get("failure/1").decode()
        group = self._group()
        join = None if group is None else in_force(group)
        return None if join is None or join.failures is self else join.failures.read()

    def agree(self, plan: str) -> str | None:
        """Compare ``plan`` with rank 0's; the other's plan where they differ."""
        if self._rank == 0:
            self._store.set("plan", plan)
            return None
        reference = self._store.get("plan").decode()
        return None if reference == plan else reference


def _one_line(error: BaseException) -> str:
    notes = " ".join(getattr(error, "__notes__", ()))
    return " ".join(f"{type(error).__name__}: {error} {notes}".split())
