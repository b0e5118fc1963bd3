"""Whether all ranks call the same collective of tensors of the same size, found out before bytes are exchanged.

[Note: compared once]

Messages of other sizes than expected end the process inside of Gloo. So the ranks compare a call the first time that
they make it, in the group's store. A call that all have made before is the same on every rank, or new on none. If a
rank makes a new one where others make one that is known, these wait for it in an exchange; every second they look
whether a rank compares this call, and take part.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from overlap._torch.c10d import Store, group_timeout
from overlap._torch.stores import BoundedStore
from overlap.errors import CollectiveError

__all__ = ["SameCalls"]

_ASKING_S = (0.001, 0.1)


class SameCalls:
    """Compares what the ranks of ``group`` call. Issues no collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._store = BoundedStore(group, "overlap/quantized")
        self._rank, self._size = group.rank(), group.size()
        self._timeout_s = group_timeout(group, torch.device("cpu")).total_seconds()
        self._known: set[str] = set()

    def check(self, number: int, call: str) -> None:
        """Compare ``call``, the ``number``-th on this group, with those of the other ranks unless it is known.

        Raises:
            CollectiveError: another rank calls something else, or calls nothing within the group's timeout.
        """
        if call not in self._known and self._size > 1:
            self._compare(number, call)
            self._known.add(call)

    def answer(self, number: int, call: str) -> None:
        """As :meth:`check`, where another rank compares; called while this one waits in ``call``."""
        keys = self._keys(number)
        if self._store.within(self._timeout_s, lambda store: any(store.check([key]) for key in keys)):
            self._compare(number, call)

    def _compare(self, number: int, call: str) -> None:
        keys = self._keys(number)
        self._store.within(self._timeout_s, lambda store: store.set(keys[self._rank], call))
        self._wait(keys, call)
        calls = self._store.within(self._timeout_s, lambda store: [store.get(key).decode() for key in keys])
        self._store.within(self._timeout_s, lambda store: self._leave(store, number))
        if len(set(calls)) > 1:
            told = "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(calls))
            raise CollectiveError(f"ranks call different quantized collectives: {told}; call the same on every rank")

    def _wait(self, keys: list[str], call: str) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        pause_s, longest_s = _ASKING_S
        while not self._store.within(self._timeout_s, lambda store: store.check(keys)):
            if time.monotonic() > deadline_s:
                missing = self._store.within(self._timeout_s, lambda store: _missing(store, keys))
                raise CollectiveError(
                    f"rank {self._rank} calls a quantized {call}, and ranks {missing} call none in "
                    f"{self._timeout_s:.0f} s"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _leave(self, store: Store, number: int) -> None:
        left = f"{number}/left"
        if store.add(left, 1) == self._size:  # The last deletes what all have read.
            for key in (*self._keys(number), left):
                store.delete_key(key)

    def _keys(self, number: int) -> list[str]:
        return [f"{number}/{rank}" for rank in range(self._size)]


def _missing(store: Store, keys: list[str]) -> list[int]:
    return [rank for rank, key in enumerate(keys) if not store.check([key])]
