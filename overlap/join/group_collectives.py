"""Collectives on a process group itself, outside of the stages. Where one fails, the error names the lost rank.

Gloo's own is "Timed out" or "Connection closed by peer". So whatever this library issues on a group that is not its own
goes through here, or through an executor.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from overlap.join.failures import losses_named

__all__ = ["all_reduce", "broadcast", "of_all_ranks", "on_rank"]


def all_reduce(tensor: Tensor, *, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup) -> None:
    """Reduce ``tensor`` over the group, in place on every rank.

    Raises:
        CollectiveError: a rank is lost.
    """
    with losses_named(group):
        dist.all_reduce(tensor, op=op, group=group)


def broadcast(tensor: Tensor, *, src: int, group: dist.ProcessGroup) -> None:
    """Copy ``tensor`` of rank ``src`` of the group to every rank, in place; raises as :func:`all_reduce`."""
    with losses_named(group):
        dist.broadcast(tensor, group=group, group_src=src)


def of_all_ranks(value: object, group: dist.ProcessGroup) -> list[Any]:
    """The ``value`` of every rank, in the order of ranks, on every rank; raises as :func:`all_reduce`."""
    everyone: list[Any] = [None] * group.size()
    with losses_named(group):
        dist.all_gather_object(everyone, value, group=group)
    return everyone


def on_rank(to: int, value: object, group: dist.ProcessGroup) -> list[Any] | None:
    """The ``value`` of every rank on rank ``to`` of the group; ``None`` elsewhere. Raises as :func:`all_reduce`."""
    everyone: list[Any] | None = [None] * group.size() if group.rank() == to else None
    with losses_named(group):
        dist.gather_object(value, everyone, group=group, group_dst=to)
    return everyone
