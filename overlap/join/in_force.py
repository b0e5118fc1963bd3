"""Which Join is in force on a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

if TYPE_CHECKING:
    from overlap.join.failures import FailureStore

__all__ = ["InForce", "in_force", "leave", "take_force"]


class InForce(Protocol):
    """What the rest of the library asks of a Join that is in force."""

    @property
    def divisor(self) -> int:
        """What sums of gradients are divided by in the present iteration."""
        ...

    @property
    def failures(self) -> FailureStore:
        """Where its ranks write that they failed."""
        ...


_in_force: WeakKeyDictionary[dist.ProcessGroup, InForce] = WeakKeyDictionary()


def in_force(group: dist.ProcessGroup) -> InForce | None:
    """The Join whose block this process is in, of those on ``group``."""
    return _in_force.get(group)


def take_force(group: dist.ProcessGroup, join: InForce) -> None:
    """``join`` is in force on ``group`` from here on."""
    _in_force[group] = join


def leave(group: dist.ProcessGroup) -> None:
    """None is any more."""
    _in_force.pop(group, None)
