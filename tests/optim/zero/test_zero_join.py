"""Uneven inputs: a rank that has run out goes on updating what it owns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.algorithms.join import Join
from zero_loops import FORMS

import overlap
from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, UNUSED_ON_SOME_RANKS, Case, mean_squared_error
from overlap import TrainingLoopError, ZeroRedundancyOptimizer, ZeroStep, chain

BATCHES = (7, 4, 5)


def _train(
    ddp: Any,
    optimizer: Any,
    case: Case,
    joinables: list[Any],
    rank: int,
    *,
    clears: bool,
    steps: bool,
    join: type[Join],
) -> Any:
    with join(joinables):
        for step in range(BATCHES[rank]):
            if clears:
                optimizer.zero_grad()
            mean_squared_error(ddp, case.batch(step, rank)).backward()
            if steps:
                optimizer.step()
    return {name: p.detach().clone() for name, p in ddp.module.named_parameters()}


def _uneven(rank: int, world_size: int, case: Case, join: type[Join] = Join) -> None:
    plain = wrap(case.model(), **case.ddp_options())
    # What a joined rank holds is brought up to date by DDP at the end; the reference's state is that of the last.
    reference = _train(
        plain, torch.optim.AdamW(plain.parameters(), lr=0.01), case, [plain], rank, clears=True, steps=True, join=join
    )
    for form, options in FORMS.items():
        if options is None and case.find_unused_parameters:
            continue
        ddp = wrap(case.model(), **case.ddp_options())
        zero = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, lr=0.01, overlap_with_ddp=options is not None
        )
        if options is not None:
            chain(ZeroStep(zero, **options)).register(ddp)
        steps = options is None or not options.get("automatic")
        ours = _train(ddp, zero, case, [ddp, zero], rank, clears=options is None, steps=steps, join=join)
        what = f"{form}, {world_size} ranks"
        if world_size == 2:
            assert_parity(ours, reference, what=what)
        else:
            assert_parity(ours, reference, what=what, exact=False, rtol=1e-3, atol=1e-4, reason="order of summation")
        states = []
        for to in range(world_size):
            zero.consolidate_state_dict(to)
            states += [zero.state_dict()] if to == rank else []
        assert states[0]["state"][0]["step"] == max(BATCHES[:world_size]), "updated in every step, on every rank"


@pytest.mark.parametrize("world_size", [2, 3])
def test_join_equals_plain_ddp_under_join(world_size: int) -> None:
    run_ranks(_uneven, world_size, MLP)


@pytest.mark.parametrize("join", [Join, overlap.Join], ids=["torch", "overlap"])
def test_join_equals_plain_ddp_if_ranks_use_a_branch_in_turn(join: type[Join]) -> None:
    run_ranks(_uneven, 2, UNUSED_ON_SOME_RANKS, join)


def _without_zero(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    chain(ZeroStep(zero, deferred=True)).register(ddp)
    match = r"Join\(\[ddp, zero\]\)" if rank == 1 else "rank 1"
    error: Any = TrainingLoopError if rank == 1 else Exception
    with pytest.raises(error, match=match):
        _train(ddp, zero, MLP, [ddp], rank, clears=False, steps=True, join=Join)


def test_a_join_without_zero_is_refused_if_zero_acts_outside_of_backward() -> None:
    run_ranks(_without_zero, 2, group_timeout_s=6)
