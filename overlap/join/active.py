"""The Join whose block a process is in, per process group."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = ["ActiveJoin", "FailureReader", "active_join", "clear_active_join", "set_active_join"]


class FailureReader(Protocol):
    """Reads the failures that ranks reported."""

    def read(self) -> str | None:
        """The first failure, with the number of its rank; ``None`` while there is none."""
        ...


class ActiveJoin(Protocol):
    """What the rest of the library asks of a Join while its block is open."""

    @property
    def divisor(self) -> int:
        """The number by which sums of gradients are divided in the present iteration."""
        ...

    @property
    def failures(self) -> FailureReader:
        """The failures that the ranks in its block reported."""
        ...


_active: WeakKeyDictionary[dist.ProcessGroup, ActiveJoin] = WeakKeyDictionary()


def active_join(group: dist.ProcessGroup) -> ActiveJoin | None:
    """The Join on ``group`` whose block this process is in, or ``None``."""
    return _active.get(group)


def set_active_join(group: dist.ProcessGroup, join: ActiveJoin) -> None:
    """Make ``join`` the active one on ``group``."""
    _active[group] = join


def clear_active_join(group: dist.ProcessGroup) -> None:
    """Leave ``group`` without an active Join."""
    _active.pop(group, None)
