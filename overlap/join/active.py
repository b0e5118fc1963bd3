"""The Join whose block a process is in, per process group."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

__all__ = ["ActiveJoin", "active_join", "clear_active_join", "gradient_divisor", "set_active_join"]


class ActiveJoin(Protocol):
    """What the rest of the library asks of a Join while its block is open."""

    @property
    def divisor(self) -> int:
        """The number by which sums of gradients are divided in the present iteration."""
        ...

    def failure(self) -> str | None:
        """The first failure that a rank in the block reported, with the number of the rank."""
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


def gradient_divisor(group: dist.ProcessGroup) -> int:
    """The number by which a sum of gradients over ``group`` is divided.

    That is the group's size, or under ``Join(..., divide_by_initial_world_size=False)`` the number of ranks that still
    have inputs. It is the same on every rank, also on those without inputs. Every reducer divides by
    ``bucket.divisor``, which is set from here alone.
    """
    join = active_join(group)
    return group.size() if join is None else join.divisor
