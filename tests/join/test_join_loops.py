"""What a loop may do inside of Join: accumulate, evaluate, leave parameters unused, come again."""

from __future__ import annotations

from typing import Any

import torch
from join_loops import (
    POLLED,
    TOLD_BY,
    assert_same_on_every_rank,
    overlapped_body,
    plain_body,
    snapshot,
    train_unevenly,
    train_with_zero_loss,
)

from harness import UNKNOWN_BACKEND, assert_parity, run_ranks, wrap
from harness.models import BATCH_NORM, MLP, UNUSED_ON_SOME_RANKS, Case, mean_squared_error
from overlap import AllReduce, Join, OverlappedOptimizer, Step, chain

SUMMATION = "three and four ranks' gradients are added up in another order"


def _make(ddp: Any, update: str | None) -> Any:
    optimizer: Any = torch.optim.AdamW(ddp.parameters(), lr=0.01, weight_decay=0.1)
    if update is not None:
        optimizer = OverlappedOptimizer(optimizer)
        chain(AllReduce(), Step(optimizer, deferred=update == "deferred")).register(ddp)
    return optimizer


def _accumulating(ddp: Any, optimizer: Any, batch: Any, scale: float) -> None:
    """Two parts of each batch, the first under no_sync."""
    optimizer.zero_grad()
    with ddp.no_sync():
        (mean_squared_error(ddp, batch) * scale).backward()
    (mean_squared_error(ddp, batch).square() * scale).backward()
    optimizer.step()


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
    "accumulating": (_accumulating, [(MLP, POLLED), (BATCH_NORM, POLLED)]),
    "two forwards": (_two_forwards, [(MLP, POLLED)]),
    "evaluating": (_evaluating, [(MLP, TOLD_BY), (BATCH_NORM, POLLED)]),
}


def _loop(rank: int, world_size: int, name: str) -> list[Any]:
    body, cases = LOOPS[name]
    results = []
    for case, ways in cases:
        ddp = wrap(case.model(), **case.ddp_options())
        reference = train_with_zero_loss(ddp, _make(ddp, None), case, rank, body=body)
        for update in (None, "interleaved", "deferred"):
            for told_by in ways:
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
    *((MLP, "deferred", told_by) for told_by in TOLD_BY),
    (MLP, None, "loader"),
    (MLP, "interleaved", "loader"),
    (BATCH_NORM, "deferred", "stream"),
    (UNUSED_ON_SOME_RANKS, None, "loader"),
    (UNUSED_ON_SOME_RANKS, "interleaved", "loader"),
]


def _all_several_joins(rank: int, world_size: int) -> list[Any]:
    return [_several_joins(rank, world_size, *cell) for cell in SEVERAL]


def test_one_join_after_another_with_ranks_without_a_batch() -> None:
    assert_same_on_every_rank(run_ranks(_all_several_joins, 4, timeout_s=180), what="one after another")


def _same_join(rank: int, world_size: int) -> Any:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = _make(ddp, "interleaved")
    join = Join([ddp, optimizer])
    for _ in range(2):
        with join:
            for batch in join.iterate(MLP.batches(rank, steps=4 - 2 * rank)):
                overlapped_body(ddp, optimizer, batch, 1.0)
    return snapshot(ddp, optimizer)


def test_the_same_join_can_be_entered_again() -> None:
    assert_same_on_every_rank(run_ranks(_same_join, 2), what="the same Join twice")


def _uneven(rank: int, world_size: int) -> Any:
    ended = []
    for told_by in TOLD_BY:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        ended.append(train_unevenly(ddp, _make(ddp, "interleaved"), MLP, rank, told_by, counts=(3, 0, 2, 5)))
    return ended


def test_join_on_a_backend_without_channels_of_our_own() -> None:
    assert_same_on_every_rank(run_ranks(_uneven, 4, backend=UNKNOWN_BACKEND), what="another backend")
