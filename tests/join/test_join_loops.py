"""What a loop may do inside of Join: accumulate, evaluate, leave parameters unused, come again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from join_loops import (
    POLLED,
    TOLD_BY,
    assert_same_on_every_rank,
    joined,
    overlapped_body,
    plain_body,
    snapshot,
    train_unevenly,
    train_with_zero_loss,
)

from harness import assert_parity, run_ranks, run_threads, wrap
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


@pytest.mark.parametrize("name", LOOPS)
def test_any_loop_is_followed(name: str) -> None:
    assert_same_on_every_rank(run_ranks(_loop, 2, name, timeout_s=120), what=name)


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


@pytest.mark.parametrize(
    ("case", "update", "told_by"),
    [(MLP, "deferred", told_by) for told_by in TOLD_BY]
    + [(MLP, None, "loader"), (MLP, "interleaved", "loader"), (BATCH_NORM, "deferred", "stream")]
    + [(UNUSED_ON_SOME_RANKS, update, "loader") for update in (None, "interleaved", "deferred")],
    ids=str,
)
def test_one_join_after_another_with_ranks_without_a_batch(case: Case, update: str | None, told_by: str) -> None:
    assert_same_on_every_rank(run_ranks(_several_joins, 4, case, update, told_by), what=told_by)


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


def _two_models(rank: int, world_size: int, is_reversed: bool) -> Any:
    """Against a rank that goes on with zeros."""
    counts = (5, 2)

    def models(update: str | None) -> list[Any]:
        made = [wrap(MLP.model(seed=seed), **MLP.ddp_options()) for seed in (0, 1)]
        return [(ddp, _make(ddp, update)) for ddp in made]

    def body(pairs: list[Any], batch: Any, scale: float) -> None:
        (encoder, encoding), (decoder, decoding) = pairs
        encoding.zero_grad()
        decoding.zero_grad()
        (torch.nn.functional.mse_loss(decoder(encoder(*batch.inputs)), batch.target) * scale).backward()
        encoding.step()
        decoding.step()

    pairs = models(None)
    for step in range(max(counts)):
        body(pairs, MLP.batch(step, rank), float(step < counts[rank]))
    reference = [snapshot(*pair) for pair in pairs]
    results = []
    ways = ("forwards", "loader", "stream")  # With several models a loader's length is not used.
    for number, told_by in enumerate(ways, start=is_reversed):
        update = (None, "interleaved", "deferred")[number % 3]
        pairs = models(update)
        listed = pairs[::-1] if is_reversed else pairs
        batches = [MLP.batch(step, rank) for step in range(counts[rank])]
        with joined([each for pair in listed for each in pair], batches, told_by) as iterated:
            for batch in iterated:
                body(pairs, batch, 1.0)
        results.append((told_by, [snapshot(*pair) for pair in pairs]))
        assert_parity(results[-1][1], reference, what=f"{told_by}, {update}")
    return results


@pytest.mark.parametrize("is_reversed", [False, True], ids=["in-order-of-forwards", "in-reverse"])
def test_two_models_in_one_join(is_reversed: bool) -> None:
    assert_same_on_every_rank(run_ranks(_two_models, 2, is_reversed), what="two models")


def _threads(rank: int, world_size: int, told_by: str) -> Any:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    return train_unevenly(ddp, _make(ddp, "interleaved"), MLP, rank, told_by, counts=(3, 0, 2, 5))


@pytest.mark.parametrize("told_by", TOLD_BY)
def test_join_on_a_backend_without_channels_of_our_own(told_by: str) -> None:
    assert_same_on_every_rank(run_threads(_threads, 4, told_by), what="threads")
