"""Backwards under `no_sync` accumulate, and the synchronized one updates."""

from __future__ import annotations

from typing import Any

import torch
from step_loops import BOTH_MODES, SGD, overlapped_ddp, plain_ddp

from harness import assert_parity, run_ranks, train
from harness.models import MLP, Batch


def _accumulating_step(ddp: Any, optimizer: Any, batch: Batch, loss_of: Any) -> torch.Tensor:
    with ddp.no_sync():
        loss_of(ddp, batch).backward()
        loss_of(ddp, batch).mul(0.5).backward()
    loss: torch.Tensor = loss_of(ddp, batch)
    loss.backward()
    optimizer.step()
    return loss


def _accumulating_plain_step(ddp: Any, optimizer: Any, batch: Batch, loss_of: Any) -> torch.Tensor:
    optimizer.zero_grad()
    return _accumulating_step(ddp, optimizer, batch, loss_of)


def _accumulated(rank: int, world_size: int, deferred: bool) -> None:
    batches = MLP.batches(rank, steps=6)
    ddp, optimizer = plain_ddp(MLP, SGD)
    reference = train(ddp, optimizer, batches, step_fn=_accumulating_plain_step, gradients=True)
    ddp, overlapped, _ = overlapped_ddp(MLP, SGD, deferred=deferred)
    candidate = train(ddp, overlapped, batches, step_fn=_accumulating_step, gradients=True)
    assert_parity(candidate, reference, what="accumulation, gradients included")


@BOTH_MODES
def test_backwards_under_no_sync_accumulate_and_are_updated_with_once(deferred: bool) -> None:
    run_ranks(_accumulated, 2, deferred)
