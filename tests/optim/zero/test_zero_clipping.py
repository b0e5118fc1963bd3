"""Clipping by hand of gradients of which a rank has parts: up to the order of summation that of plain DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import TrainingLoopError, ZeroRedundancyOptimizer, ZeroStep, chain

FORMS = ("deferred", "gathered in forward", "without a stage")


def _zero(ddp: Any, form: str) -> ZeroRedundancyOptimizer:
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    if form == "deferred":
        chain(ZeroStep(zero, deferred=True)).register(ddp)
    elif form == "gathered in forward":
        chain(ZeroStep(zero, deferred=True, gather="forward")).register(ddp)
    return zero


def _clip(rank: int, world_size: int, norm_type: float, max_norm: float) -> None:
    for form in FORMS:
        plain, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
        reference, zero = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), _zero(ddp, form)
        is_exact = form == "without a stage"  # The optimizer's order is the model's here.
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
    with pytest.raises(TrainingLoopError, match="so they cannot be clipped"):
        zero.clip_grad_norm_(1.0, error_if_nonfinite=True)


def test_clipping_zero_where_there_is_nothing_to_clip_is_refused() -> None:
    run_ranks(_refused, 2)
