"""Clipping by hand: `zero.clip_grad_norm_` is plain DDP's `clip_grad_norm_`, up to the order of the sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import AllReduce, TrainingLoopError, ZeroRedundancyOptimizer, ZeroStep, chain

FORMS = ("deferred", "after a reducer", "gathered in forward", "without a stage")


def _zero(ddp: Any, form: str) -> ZeroRedundancyOptimizer:
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    if form == "deferred":
        chain(ZeroStep(zero, deferred=True)).register(ddp)
    elif form == "after a reducer":
        chain(AllReduce(), ZeroStep(zero, deferred=True)).register(ddp)
    elif form == "gathered in forward":
        chain(ZeroStep(zero, deferred=True, gather="forward")).register(ddp)
    return zero


def _clip(rank: int, world_size: int, norm_type: float, max_norm: float) -> None:
    for form in FORMS:
        plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        reference, zero = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), _zero(ddp, form)
        is_exact = form in ("after a reducer", "without a stage")
        for batch in MLP.batches(rank, steps=5):
            reference.zero_grad()
            mean_squared_error(plain, batch).backward()
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
            reference.step()
            zero.zero_grad()
            mean_squared_error(ddp, batch).backward()
            norm = zero.clip_grad_norm_(max_norm, norm_type)
            zero.step()
            norms = [torch.zeros_like(norm) for _ in range(world_size)]
            torch.distributed.all_gather(norms, norm)
            assert all(torch.equal(norm, other) for other in norms)
            tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {"rtol": 1e-5, "atol": 1e-7}
            torch.testing.assert_close(norm, expected, **tolerance)
        zero.wait()
        for ours, theirs in zip(ddp.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize(("norm_type", "max_norm"), [(2.0, 0.1), (float("inf"), 0.01), (2.0, 1e9)])
def test_clipping_zero_by_hand_is_that_of_plain_ddp(norm_type: float, max_norm: float) -> None:
    run_ranks(_clip, 2, norm_type, max_norm)


def _refused(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    chain(ZeroStep(zero)).register(ddp)
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    with pytest.raises(TrainingLoopError, match=r"made in backward: use ZeroStep\(zero, deferred=True\)"):
        zero.clip_grad_norm_(1.0)
    zero.step()
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    zero = _zero(ddp, "deferred")
    with pytest.raises(TrainingLoopError, match="between a synchronized backward and step"):
        zero.clip_grad_norm_(1.0)
    loss = mean_squared_error(ddp, MLP.batch(0, rank)) * float("inf")
    loss.backward()
    with pytest.raises(TrainingLoopError, match="non-finite"):
        zero.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_clipping_zero_where_there_is_nothing_to_clip_is_refused() -> None:
    run_ranks(_refused, 2)


def _by_hand(rank: int, world_size: int) -> None:
    for unscales in (False, True):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        zero = _zero(ddp, "deferred")
        for step in range(3):
            mean_squared_error(ddp, MLP.batch(step, rank)).backward()
            for parameter in ddp.parameters():
                parameter.grad.mul_(0.25 if unscales else 1.0)
            if step == 1:
                torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e9)  # Multiplies by 1.
            if step < 2:
                zero.step()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
        with pytest.raises(TrainingLoopError, match=r"use zero\.clip_grad_norm_\(max_norm\)"):
            zero.step()


def test_clipping_zero_by_hand_with_torchs_function_is_an_error_where_it_binds() -> None:
    run_ranks(_by_hand, 2)
