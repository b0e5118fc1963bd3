"""Loops that run out of batches at different times, in both ways in which iterations begin."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from harness import assert_parity, registered
from harness.models import Case, mean_squared_error
from overlap import Join
from overlap.ranks.board import of_all_ranks

BATCHES = (6, 3, 4, 0)
# Where an iteration begins: with a forward, or with a batch of join.iterate.
TOLD_BY = ("forwards", "batches")
# Of each form of update one way.
FORMS = {"plain": "forwards", "interleaved": "batches", "deferred": "forwards", "zero": "batches"}
Body = Callable[[Any, Any, Any, float], None]


def make(ddp: Any, form: str, cls: Any = torch.optim.SGD, **defaults: Any) -> Any:
    """The optimizer of one of ``FORMS``, registered."""
    maker = functools.partial(cls, **defaults)
    return maker(ddp.parameters()) if form == "plain" else registered(form, ddp, maker)


def plain_body(ddp: Any, optimizer: Any, batch: Any, scale: float) -> None:
    optimizer.zero_grad()
    (mean_squared_error(ddp, batch) * scale).backward()
    optimizer.step()


def overlapped_body(ddp: Any, optimizer: Any, batch: Any, scale: float) -> None:
    (mean_squared_error(ddp, batch) * scale).backward()
    optimizer.step()


@contextlib.contextmanager
def joined(joinables: list[Any], batches: list[Any], told_by: str, **options: Any) -> Iterator[Iterable[Any]]:
    """The batches under a Join that learns in one of the ways in ``TOLD_BY`` which ranks have inputs."""
    with Join(joinables, **options) as join:
        yield batches if told_by == "forwards" else join.iterate(batches)


def train_unevenly(
    ddp: Any,
    optimizer: Any,
    case: Case,
    rank: int,
    told_by: str,
    *,
    body: Body = plain_body,
    scheduler: Any = None,
    counts: tuple[int, ...] = BATCHES,
    **options: Any,
) -> dict[str, Any]:
    """Train under a Join as long as this rank has batches; a snapshot after it."""
    joinables = [ddp, optimizer] if scheduler is None else [ddp, optimizer, scheduler]
    with joined(joinables, case.batches(rank, steps=counts[rank]), told_by, **options) as iterated:
        for batch in iterated:
            body(ddp, optimizer, batch, 1.0)
            if scheduler is not None:
                scheduler.step()
    return snapshot(ddp, optimizer)


def train_with_zero_loss(
    ddp: Any, optimizer: Any, case: Case, rank: int, *, body: Body, counts: tuple[int, ...] = BATCHES
) -> dict[str, Any]:
    """The same without a Join: a rank that has run out goes on with a loss of zero."""
    world_size = torch.distributed.get_world_size()
    for step in range(max(counts[:world_size])):
        body(ddp, optimizer, case.batch(step, rank), 1.0 if step < counts[rank] else 0.0)
    return snapshot(ddp, optimizer)


def snapshot(ddp: Any, optimizer: Any) -> dict[str, Any]:
    """Copies of what must be the same on every rank; no rank has the whole state of a sharded optimizer."""
    state = {"model": ddp.module.state_dict()}
    if optimizer is not None and not hasattr(optimizer, "consolidate_state_dict"):
        state["optimizer"] = optimizer.state_dict()
    copied: dict[str, Any] = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), state)
    return copied


def assert_same_on_every_rank(result: Any, *, what: str) -> None:
    """Called on every rank."""
    assert_parity(result, of_all_ranks(result, torch.distributed.group.WORLD)[0], what=f"{what}: against rank 0")
