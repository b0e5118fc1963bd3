"""Averages that are made while training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_loops import Values, assign, local, mean_of, plain, run, values_of
from torch import nn

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP
from overlap import OverlappedOptimizer, Step
from overlap.optim.local_sgd import LocalSGD

START, STEPS, PERIOD = 3, 14, 4


def _build(form: str, delay: int, ddp: Any, optimizer: Any) -> LocalSGD:
    if form == "alone":
        return LocalSGD(ddp, optimizer, PERIOD, START, overlap=delay)
    wrapped = OverlappedOptimizer(optimizer)
    return LocalSGD(ddp, wrapped, PERIOD, START, overlap=delay, update=Step(wrapped))


def _overlapped(rank: int, world_size: int, form: str, delay: int) -> None:
    pending: dict[int, tuple[Values, Values]] = {}

    def after_step(model: nn.Module, optimizer: Any, count: int) -> None:
        if count in pending:
            snapshot, mean = pending.pop(count)
            current = values_of(model)
            assign(model, {n: (current[n] - snapshot[n]) + mean[n] for n in current})
        if count % PERIOD == 0:
            snapshot = values_of(model)
            pending[count + delay] = (snapshot, mean_of(snapshot))

    reference = plain(MLP, rank, steps=STEPS, start_step=START, after_step=after_step)
    candidate, made, ddp = local(
        MLP, rank, steps=STEPS, build=lambda d, o: _build(form, delay, d, o), zero_grad=form == "alone"
    )
    assert_parity(candidate, reference, what=f"{form}, overlap {delay}")
    made.synchronize()
    assert_parity(values_of(ddp.module), mean_of(values_of(ddp.module)), what="synchronized")


@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize("form", ["alone", "update in backward"])
def test_what_a_rank_learns_during_an_average_is_kept(form: str, delay: int) -> None:
    run_ranks(_overlapped, 2, form, delay)


def _learns_nothing(rank: int, world_size: int) -> None:
    def train(overlap: bool) -> list[Values]:
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        made = LocalSGD(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), PERIOD, 0, overlap=overlap)
        records = []
        for step in range(2 * PERIOD + 1):
            # The rate is 0 in the step in which the average is pending.
            made.param_groups[0]["lr"] = 0.0 if step and step % PERIOD == 0 else 0.1
            records += run(MLP, rank, [step], ddp, made)
        return records

    blocking, overlapped = train(False), train(True)
    assert_parity(overlapped[PERIOD], blocking[PERIOD], what="overlapped with a step that learns nothing")
    assert_parity(overlapped[-1], blocking[-1], what="overlapped, a round later")


def test_an_average_behind_a_step_that_learns_nothing_is_the_blocking_one() -> None:
    run_ranks(_learns_nothing, 2)
