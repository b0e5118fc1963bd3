"""Keys that ranks have left in a group's store and that nobody will read any more.

[Note: keys left behind]

A store keeps every key until it is deleted, and nobody can know by a clock when a slow rank has read it. So ranks that
share keys count: each says once that it will read none of them any more, and the last to say so deletes them all, with
the count. Until then a rank is missing from the count, and every key is there for it; so none is ever deleted before a
rank has read it, however late that comes.

Where a rank fails, or removes a registration, it only takes note that it reads no more, and says so when it meets the
ranks of the group again, for whatever purpose: by then the others may have read why. Nothing is written when a script
ends, since the store's host may have gone. So a store has what is in use, and what was left since the last meeting. The
keys of ranks that ended without a word stay, and so do those of a meeting to which a rank never came.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from overlap._torch.c10d import Store, group_timeout
from overlap._torch.stores import BoundedStore

__all__ = ["leave", "leave_released", "release"]

_COUNT = "left"

_Leaving = Callable[[Store], None]
_released: WeakKeyDictionary[dist.ProcessGroup, deque[tuple[str, _Leaving]]] = WeakKeyDictionary()


def leave(store: Store, *, size: int, keys: Iterable[str]) -> None:
    """Say in ``store`` that this rank, one of ``size``, reads none of its ``keys`` any more; the last deletes them.

    Called once by each rank. Only the last iterates over ``keys``, which may read the store.
    """
    if store.add(_COUNT, 1) == size:
        for key in [*keys, _COUNT]:
            store.delete_key(key)


def release(group: dist.ProcessGroup, prefix: str, leaving: _Leaving) -> None:
    """Take note that this rank reads nothing under ``prefix`` any more in the store of ``group``.

    ``leaving``, which calls :func:`leave`, is called with that store when the ranks meet again; it must not keep
    ``group`` alive. Takes no lock, since the garbage collector may call it.
    """
    _released.setdefault(group, deque()).append((prefix, leaving))


def leave_released(group: dist.ProcessGroup) -> None:
    """Say what this rank has released on ``group``. Never raises: where the store does not answer, keys stay."""
    released = _released.get(group)
    timeout_s = group_timeout(group, torch.device("cpu")).total_seconds()
    with contextlib.suppress(RuntimeError, IndexError):  # Another thread may have taken the last.
        while released:
            prefix, leaving = released.popleft()
            BoundedStore(group, prefix).within(timeout_s, leaving)
