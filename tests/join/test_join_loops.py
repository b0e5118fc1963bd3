"""What a loop may do inside of Join: two forwards, evaluate, leave parameters unused; and one Join after another."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from join_loops import (
    POLLED,
    assert_same_on_every_rank,
    plain_body,
    train_unevenly,
    train_with_zero_loss,
)

from harness import UNKNOWN_BACKEND, assert_parity, run_ranks, wrap
from harness.models import BATCH_NORM, MLP, UNUSED_ON_SOME_RANKS, Case
from overlap import AllReduce, OverlappedOptimizer, Step, chain

SUMMATION = "three and four ranks' gradients are added up in another order"


def _make(ddp: Any, update: str | None) -> Any:
    optimizer: Any = torch.optim.AdamW(ddp.parameters(), lr=0.01, weight_decay=0.1)
    if update is not None:
        optimizer = OverlappedOptimizer(optimizer)
        chain(AllReduce(), Step(optimizer, deferred=update == "deferred")).register(ddp)
    return optimizer


def _two_forwards(ddp: Any, optimizer: Any, batch: Any, scale: float) -> None:
    optimizer.zero_grad()
    first, second = ddp(*batch.inputs), ddp(*(-each for each in batch.inputs))
    ((first - second + batch.target).square().mean() * scale).backward()
    optimizer.step()


def _evaluating(ddp: Any, optimizer: Any, batch: Any, scale: float) -> None:
    """A forward under no_grad on either side of the training step."""
    with torch.no_grad():
        ddp(*batch.inputs)
    plain_body(ddp, optimizer, batch, scale)
    with torch.no_grad():
        ddp.eval()
        ddp(*batch.inputs)
        ddp.train()


# Of each loop, the body, its models, and how a Join learns of it. With BatchNorm DDP itself cannot have two forwards
# before a backward; and forwards under no_grad synchronize its buffers, so lengths may not be known.
LOOPS: dict[str, tuple[Any, list[tuple[Case, tuple[str, ...]]]]] = {
    "two forwards": (_two_forwards, [(MLP, POLLED)]),
    "evaluating": (_evaluating, [(MLP, ("lengths",)), (BATCH_NORM, POLLED)]),
}


def _loop(rank: int, world_size: int, name: str) -> list[Any]:
    body, cases = LOOPS[name]
    results = []
    for case, ways in cases:
        ddp = wrap(case.model(), **case.ddp_options())
        reference = train_with_zero_loss(ddp, _make(ddp, None), case, rank, body=body)
        for update, told_by in zip((None, "interleaved", "deferred"), itertools.cycle(ways), strict=False):
            ddp = wrap(case.model(), **case.ddp_options())
            ours = train_unevenly(ddp, _make(ddp, update), case, rank, told_by, body=body)
            if case is MLP:
                assert_parity(ours, reference, what=f"{told_by}, {update}")
            results.append((case.name, told_by, update, ours))
    return results


def _loops(rank: int, world_size: int) -> list[Any]:
    return [result for name in LOOPS for result in _loop(rank, world_size, name)]


def test_any_loop_is_followed() -> None:
    assert_same_on_every_rank(run_ranks(_loops, 2, timeout_s=120), what="a loop")


def _several_joins(rank: int, world_size: int, case: Case, update: str | None, told_by: str) -> list[Any]:
    """Four ranks, the last without a batch; then a second Join with other numbers, a third with equal ones."""
    ddp = wrap(case.model(), **case.ddp_options())
    optimizer = _make(ddp, update)
    plain_ddp = wrap(case.model(), **case.ddp_options())
    plain = _make(plain_ddp, None)
    results = []
    for counts in ((6, 3, 4, 0), (2, 5, 0, 5), (3, 3, 3, 3)):
        ours = train_unevenly(ddp, optimizer, case, rank, told_by, counts=counts)
        results.append((counts, ours))
        if case is MLP:
            reference = train_with_zero_loss(plain_ddp, plain, case, rank, body=plain_body, counts=counts)
            assert_parity(ours, reference, what=str(counts), exact=False, rtol=2e-3, atol=2e-4, reason=SUMMATION)
    return results


# Of the models how they are updated, and how a Join learns of it.
SEVERAL: list[tuple[Case, str | None, str]] = [
    (MLP, "deferred", "lengths"),
    (MLP, None, "forwards"),
    (MLP, "interleaved", "stream"),
    (BATCH_NORM, "deferred", "stream"),
    (UNUSED_ON_SOME_RANKS, "interleaved", "loader"),
]


def _all_several_joins(rank: int, world_size: int) -> list[Any]:
    return [_several_joins(rank, world_size, *cell) for cell in SEVERAL]


def test_one_join_after_another_with_ranks_without_a_batch() -> None:
    assert_same_on_every_rank(run_ranks(_all_several_joins, 4, timeout_s=180), what="one after another")


def _uneven(rank: int, world_size: int) -> Any:
    ended = []
    for told_by in ("lengths", "stream"):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        ended.append(train_unevenly(ddp, _make(ddp, "interleaved"), MLP, rank, told_by, counts=(3, 0, 2, 5)))
    return ended


def test_join_on_a_backend_without_channels_of_our_own() -> None:
    assert_same_on_every_rank(run_ranks(_uneven, 4, backend=UNKNOWN_BACKEND), what="another backend")
