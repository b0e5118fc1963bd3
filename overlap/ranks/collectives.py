"""Collectives on a process group itself, outside of the stages. Where one fails, the error is a CollectiveError."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from overlap._torch.c10d import has_lost_connection
from overlap.errors import CollectiveError
from overlap.ranks.board import explained

__all__ = ["all_reduce", "broadcast", "failures_explained", "of_all_ranks", "on_rank"]


@contextlib.contextmanager
def failures_explained() -> Iterator[None]:
    """For collectives on a group itself. Raises: CollectiveError: one of them has lost a connection."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, CollectiveError) or not has_lost_connection(error):
            raise
        raise explained(error, "failed") from error


def all_reduce(tensor: Tensor, *, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup) -> None:
    """Reduce ``tensor`` over the group, in place on every rank.

    Raises:
        CollectiveError: a rank is lost.
    """
    with failures_explained():
        dist.all_reduce(tensor, op=op, group=group)


def broadcast(tensor: Tensor, *, src: int, group: dist.ProcessGroup) -> None:
    """Copy ``tensor`` of rank ``src`` of the group to every rank, in place; raises as :func:`all_reduce`."""
    with failures_explained():
        dist.broadcast(tensor, group=group, group_src=src)


def of_all_ranks(value: object, group: dist.ProcessGroup) -> list[Any]:
    """The ``value`` of every rank, in the order of ranks, on every rank; raises as :func:`all_reduce`."""
    everyone: list[Any] = [None] * group.size()
    with failures_explained():
        dist.all_gather_object(everyone, value, group=group)
    return everyone


def on_rank(to: int, value: object, group: dist.ProcessGroup) -> list[Any] | None:
    """The ``value`` of every rank on rank ``to`` of the group; ``None`` elsewhere. Raises as :func:`all_reduce`."""
    everyone: list[Any] | None = [None] * group.size() if group.rank() == to else None
    with failures_explained():
        dist.gather_object(value, everyone, group=group, group_dst=to)
    return everyone
