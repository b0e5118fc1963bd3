"""`GradScaler` with a deferred update: what it skips, unscales and clips is as with plain DDP."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from step_loops import SGD, Make, overlapped_ddp, plain_ddp

from harness import Record, assert_parity, run_ranks, train
from harness.models import MLP, Batch
from overlap import TrainingLoopError

STEPS = 7
OVERFLOWS = (1, 4)  # On one rank alone.
EVERY_IMPLEMENTATION = pytest.mark.parametrize(
    "implementation", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str
)


def _scaled_step(
    ddp: Any,
    optimizer: Any,
    batch: Batch,
    loss_of: Any,
    *,
    scaler: Any,
    overflows: list[bool],
    zero_grad: bool,
    clips: bool,
) -> torch.Tensor:
    if zero_grad:
        optimizer.zero_grad()
    loss: torch.Tensor = loss_of(ddp, batch)
    if overflows.pop(0):
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    if clips:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)
    scaler.step(optimizer)
    scaler.update()
    return loss.nan_to_num(0, 0, 0)


def _scaled(rank: int, ddp: Any, optimizer: Any, *, zero_grad: bool = False, clips: bool = False) -> list[Record]:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    overflows = [rank == 1 and step in OVERFLOWS for step in range(STEPS)]
    step_fn = functools.partial(_scaled_step, scaler=scaler, overflows=overflows, zero_grad=zero_grad, clips=clips)
    records = train(ddp, optimizer, MLP.batches(rank, steps=STEPS), step_fn=step_fn)
    assert scaler.get_scale() == 1024.0 / 2 ** len(OVERFLOWS), "halved at each step that was skipped"
    return records


def _reference(rank: int, make: Make, *, clips: bool) -> list[Record]:
    return _scaled(rank, *plain_ddp(MLP, make), zero_grad=True, clips=clips)


def _adamw(implementation: dict[str, bool]) -> Make:
    return functools.partial(torch.optim.AdamW, lr=0.01, **implementation)


def _skipping(rank: int, world_size: int, implementation: dict[str, bool]) -> None:
    make = _adamw(implementation)
    ddp, overlapped, _ = overlapped_ddp(MLP, make, deferred=True)
    assert_parity(_scaled(rank, ddp, overlapped), _reference(rank, make, clips=False), what="GradScaler")


@EVERY_IMPLEMENTATION
def test_a_step_that_overflows_is_skipped_as_a_whole(implementation: dict[str, bool]) -> None:
    run_ranks(_skipping, 2, implementation)


def _clipping_in_the_loop(rank: int, world_size: int, implementation: dict[str, bool]) -> None:
    make = _adamw(implementation)
    ddp, overlapped, _ = overlapped_ddp(MLP, make, deferred=True)
    candidate = _scaled(rank, ddp, overlapped, clips=True)
    assert_parity(candidate, _reference(rank, make, clips=True), what="GradScaler, clipping in the loop")


@EVERY_IMPLEMENTATION
def test_the_loop_may_unscale_and_clip_between_backward_and_step(implementation: dict[str, bool]) -> None:
    run_ranks(_clipping_in_the_loop, 2, implementation)


def _clipping_in_step(rank: int, world_size: int, implementation: dict[str, bool]) -> None:
    make = _adamw(implementation)
    ddp, overlapped, _ = overlapped_ddp(MLP, make, clip_grad_norm=0.05)
    candidate = _scaled(rank, ddp, overlapped)
    assert_parity(candidate, _reference(rank, make, clips=True), what="GradScaler, clipping in step()")


@EVERY_IMPLEMENTATION
def test_clip_grad_norm_clips_the_unscaled_gradients(implementation: dict[str, bool]) -> None:
    run_ranks(_clipping_in_step, 2, implementation)


def _interleaved(rank: int, world_size: int) -> None:
    ddp, optimizer, _ = overlapped_ddp(MLP, SGD)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(ddp(*MLP.batch(0, rank).inputs).sum()).backward()
    with pytest.raises(TrainingLoopError, match="deferred=True"):
        scaler.step(optimizer)


def test_a_scaler_is_refused_by_an_interleaved_update() -> None:
    run_ranks(_interleaved, 2)
