"""Clipping by the global norm, by the stage and in vain by the loop."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from step_loops import SGD, overlapped_ddp, plain_ddp
from torch import nn

from harness import Record, assert_parity, overlapped_step, run_ranks, train, wrap
from harness.models import DTYPES, MLP, UNUSED, Batch, Case
from overlap import AllReduce, ConfigurationError, Step, TrainingLoopError, chain

EVERY_CASE = pytest.mark.parametrize("case", [MLP, DTYPES, UNUSED], ids=str)
EITHER_NORM = pytest.mark.parametrize("norm_type", [2.0, float("inf")])


def _clipping_step(ddp: Any, optimizer: Any, batch: Batch, loss_of: Any, *, norm_type: float) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = loss_of(ddp, batch)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.05, norm_type=norm_type)
    assert norm > 0.05, "a clip that does nothing shows nothing"
    optimizer.step()
    return loss


def _step_in_backward(ddp: Any, optimizer: Any, batch: Batch, loss_of: Any) -> torch.Tensor:
    loss: torch.Tensor = loss_of(ddp, batch)
    loss.backward()
    return loss


def _clipped_by_the_loop(case: Case, batches: list[Batch], norm_type: float) -> list[Record]:
    ddp, optimizer = plain_ddp(case, SGD)
    step_fn = functools.partial(_clipping_step, norm_type=norm_type)
    return train(ddp, optimizer, batches, step_fn=step_fn, gradients=True)


def _clipped_in_step(rank: int, world_size: int, case: Case, norm_type: float) -> None:
    batches = case.batches(rank, steps=6)
    ddp, overlapped, _ = overlapped_ddp(case, SGD, clip_grad_norm=0.05, norm_type=norm_type)
    candidate = train(ddp, overlapped, batches, step_fn=overlapped_step, gradients=True)
    assert_parity(candidate, _clipped_by_the_loop(case, batches, norm_type), what="clipping in step()")


@EITHER_NORM
@EVERY_CASE
def test_clipping_in_step_equals_clip_grad_norm(case: Case, norm_type: float) -> None:
    run_ranks(_clipped_in_step, 2, case, norm_type)


def _clipped_in_backward(rank: int, world_size: int, case: Case, norm_type: float) -> None:
    batches = case.batches(rank, steps=6)
    ddp, optimizer = plain_ddp(case, SGD)
    chain(AllReduce(), Step(optimizer, clip_grad_norm=0.05, norm_type=norm_type)).register(ddp)
    candidate = train(ddp, optimizer, batches, step_fn=_step_in_backward, gradients=True)
    assert_parity(candidate, _clipped_by_the_loop(case, batches, norm_type), what="clipping in backward")


@EITHER_NORM
@EVERY_CASE
def test_clipping_with_the_last_bucket_of_backward_equals_clip_grad_norm(case: Case, norm_type: float) -> None:
    run_ranks(_clipped_in_backward, 2, case, norm_type)


def _clipped_after_the_update(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(AllReduce(), Step(SGD(ddp.parameters()))).register(ddp)
    for step in range(2):
        ddp(*MLP.batch(step, rank).inputs).sum().backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
    with pytest.raises(TrainingLoopError, match=r"changed after backward.*deferred=True"):
        ddp(*MLP.batch(2, rank).inputs)


def test_clipping_what_a_plain_optimizer_has_applied_is_an_error_at_the_next_forward() -> None:
    run_ranks(_clipped_after_the_update, 2)


def test_clip_grad_norm_cannot_be_interleaved() -> None:
    optimizer = SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(ConfigurationError, match=r"clip_grad_norm=1\.0 needs the norm of all"):
        Step(optimizer, deferred=False, clip_grad_norm=1.0)


def test_clip_grad_norm_must_be_positive() -> None:
    optimizer = SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(ConfigurationError, match="clip_grad_norm must be positive, got -1"):
        Step(optimizer, clip_grad_norm=-1)
