"""Loops that run out of batches at different times, in each of the ways in which a Join can be told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from harness.models import Case, mean_squared_error
from overlap import Join

BATCHES = (6, 3, 4, 0)
# How a Join learns who has inputs.
WAYS = ("forwards", "lengths", "loader", "stream")
Body = Callable[[Any, Any, Any, float], None]


def plain_body(ddp: Any, optimizer: Any, batch: Any, scale: float) -> None:
    optimizer.zero_grad()
    (mean_squared_error(ddp, batch) * scale).backward()
    optimizer.step()


def overlapped_body(ddp: Any, optimizer: Any, batch: Any, scale: float) -> None:
    (mean_squared_error(ddp, batch) * scale).backward()
    optimizer.step()


@contextlib.contextmanager
def joined(joinables: list[Any], batches: list[Any], way: str | None, **options: Any) -> Iterator[Iterable[Any]]:
    """The batches under a Join that is told in one of ``WAYS``."""
    if way == "lengths":
        options["lengths"] = len(batches)
    with Join(joinables, **options) as join:
        if way in ("forwards", "lengths"):
            yield batches
        else:
            yield join.iterate(batches if way == "loader" else iter(batches))


def uneven(
    ddp: Any,
    optimizer: Any,
    case: Case,
    rank: int,
    way: str,
    *,
    body: Body = plain_body,
    joinables: list[Any] | None = None,
    scheduler: Any = None,
    counts: tuple[int, ...] = BATCHES,
    **options: Any,
) -> dict[str, Any]:
    """Train as long as this rank has batches; what is left behind."""
    batches = [case.batch(step, rank) for step in range(counts[rank])]
    things = [ddp, optimizer] if joinables is None else joinables
    with joined(things, batches, way, **options) as iterated:
        for batch in iterated:
            body(ddp, optimizer, batch, 1.0)
            if scheduler is not None:
                scheduler.step()
    return left(ddp, optimizer)


def even(
    ddp: Any, optimizer: Any, case: Case, rank: int, *, body: Body, counts: tuple[int, ...] = BATCHES
) -> dict[str, Any]:
    """The same without any Join: a rank that has run out goes on with a loss of zero."""
    world_size = torch.distributed.get_world_size()
    for step in range(max(counts[:world_size])):
        body(ddp, optimizer, case.batch(step, rank), 1.0 if step < counts[rank] else 0.0)
    return left(ddp, optimizer)


def left(ddp: Any, optimizer: Any) -> dict[str, Any]:
    """Copies of what must be the same on every rank."""
    state = optimizer.state_dict() if optimizer is not None else {}
    copied: dict[str, Any] = torch.utils._pytree.tree_map_only(
        Tensor, lambda tensor: tensor.detach().clone(), {"model": ddp.module.state_dict(), "optimizer": state}
    )
    return copied
