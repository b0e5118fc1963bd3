"""What a loop may do inside of Join: two forwards, evaluate, leave parameters unused; and one Join after another."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from join_loops import (
    TOLD_BY,
    assert_same_on_every_rank,
    joined,
    plain_body,
    snapshot,
    train_unevenly,
    train_with_zero_loss,
)

from harness import UNKNOWN_BACKEND, assert_parity, run_ranks, wrap
from harness.models import BATCH_NORM, MLP, UNUSED_ON_SOME_RANKS, Case, mean_squared_error
from overlap import AllReduce, Join, OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep, chain, declare

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


# Of each loop the body and its models. With BatchNorm DDP itself cannot have two forwards before a backward.
LOOPS: dict[str, tuple[Any, list[Case]]] = {
    "two forwards": (_two_forwards, [MLP]),
    "evaluating": (_evaluating, [MLP, BATCH_NORM]),
}


def _loop(rank: int, world_size: int, name: str) -> list[Any]:
    body, cases = LOOPS[name]
    results = []
    for case in cases:
        ddp = wrap(case.model(), **case.ddp_options())
        reference = train_with_zero_loss(ddp, _make(ddp, None), case, rank, body=body)
        for update, told_by in zip((None, "interleaved", "deferred"), itertools.cycle(TOLD_BY), strict=False):
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
    (MLP, "deferred", "batches"),
    (BATCH_NORM, "deferred", "batches"),
    (UNUSED_ON_SOME_RANKS, "interleaved", "batches"),
]


def _all_several_joins(rank: int, world_size: int) -> list[Any]:
    return [_several_joins(rank, world_size, *cell) for cell in SEVERAL]


def test_one_join_after_another_with_ranks_without_a_batch() -> None:
    assert_same_on_every_rank(run_ranks(_all_several_joins, 4, timeout_s=180), what="one after another")


def _uneven(rank: int, world_size: int) -> Any:
    ended = []
    for told_by in TOLD_BY:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        ended.append(train_unevenly(ddp, _make(ddp, "interleaved"), MLP, rank, told_by, counts=(3, 0, 2, 5)))
    return ended


def test_join_on_a_backend_without_channels_of_our_own() -> None:
    assert_same_on_every_rank(run_ranks(_uneven, 4, backend=UNKNOWN_BACKEND), what="another backend")


@declare("element")
class _Counts(torch.optim.Optimizer):
    """SGD whose rate falls with a count of its calls in its groups."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] / group["calls"])


class _SeveralSteps:
    """A wrapper of a scheduler such as Accelerate's: one ``step()`` is one of the scheduler inside for each process."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def step(self) -> None:
        for _ in range(2):
            self.scheduler.step()


def _with_groups_that_change(rank: int, world_size: int) -> None:
    counts = (5, 2)
    for form in ("reference", "plain", "interleaved", "deferred", "zero"):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optim: Any = _Counts(ddp.parameters())
        if form == "zero":
            optim = ZeroRedundancyOptimizer(ddp.parameters(), _Counts, lr=0.1, overlap_with_ddp=True)
            chain(ZeroStep(optim)).register(ddp)
        elif form in ("interleaved", "deferred"):
            optim = OverlappedOptimizer(optim)
            chain(AllReduce(), Step(optim, deferred=form == "deferred")).register(ddp)
        scheduler = _SeveralSteps(torch.optim.lr_scheduler.ExponentialLR(optim, 0.9))

        def body(ddp: Any, optim: Any, batch: Any, scale: float, scheduler: Any = scheduler) -> None:
            optim.zero_grad()
            (mean_squared_error(ddp, batch) * scale).backward()
            optim.step()
            scheduler.step()

        if form == "reference":
            train_with_zero_loss(ddp, optim, MLP, rank, body=body, counts=counts)
            reference = ddp
            continue
        with Join([ddp, optim, scheduler]) as join:
            for batch in join.iterate(MLP.batches(rank, steps=counts[rank])):
                body(ddp, optim, batch, 1.0)
        assert_parity(ddp.module.state_dict(), reference.module.state_dict(), what=form)
        (group,) = optim.param_groups
        assert (group["calls"], group["lr"]) == (5, pytest.approx(0.1 * 0.9**10)), form


def test_groups_that_change_in_each_step_are_followed() -> None:
    run_ranks(_with_groups_that_change, 2)


def _without_a_batch(rank: int, world_size: int) -> list[Any]:
    """The update is made in backward, and rank 0 never runs one."""
    counts = (0, 4)
    results = []

    reference = wrap(MLP.model(), **MLP.ddp_options())
    momentum = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    expected = train_with_zero_loss(reference, momentum, MLP, rank, body=plain_body, counts=counts)["model"]
    for form, told_by in zip(("interleaved", "deferred", "zero"), itertools.cycle(TOLD_BY), strict=False):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optim: Any = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))
        if form == "zero":
            optim = ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, overlap_with_ddp=True
            )
        stages = [ZeroStep(optim)] if form == "zero" else [AllReduce(), Step(optim, deferred=form == "deferred")]
        chain(*stages).register(ddp)
        with joined([ddp, optim], MLP.batches(rank, steps=counts[rank]), told_by) as batches:
            for batch in batches:
                mean_squared_error(ddp, batch).backward()
                optim.step()
        assert_parity(ddp.module.state_dict(), expected, what=f"{form}, {told_by}")
        # And all go on together.
        mean_squared_error(ddp, MLP.batch(9, rank)).backward()
        optim.step()
        results.append((form, told_by, snapshot(ddp, None)))
    return results


def test_a_rank_without_a_batch_makes_every_update_in_backward() -> None:
    assert_same_on_every_rank(run_ranks(_without_a_batch, 2, timeout_s=120), what="without a batch")
