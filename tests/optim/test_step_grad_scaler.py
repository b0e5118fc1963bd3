"""`GradScaler` with a deferred update: what it skips, unscales and clips is as with plain DDP."""

import functools
import itertools
from typing import Any

import pytest
import torch
from step_loops import overlapped_ddp, plain_ddp, registered

from harness import Record, assert_parity, on_ranks, train, wrap
from harness.models import MLP, Batch
from overlap import Join, TrainingLoopError

STEPS = 5
OVERFLOWS = (1, 3)  # On one rank alone.


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


@on_ranks(2)
def test_a_step_that_overflows_is_skipped_and_others_are_unscaled(rank: int, world_size: int) -> None:
    for clips, implementation in itertools.product((False, True), ({"foreach": True}, {"fused": True})):
        make = functools.partial(torch.optim.AdamW, lr=0.01, **implementation)
        ddp, overlapped, _ = overlapped_ddp(MLP, make, deferred=True)
        candidate = _scaled(rank, ddp, overlapped, clips=clips)
        reference = _scaled(rank, *plain_ddp(MLP, make), zero_grad=True, clips=clips)
        assert_parity(candidate, reference, what=f"GradScaler, {clips=}, {implementation}")


@on_ranks(2)
def test_a_scaler_under_join_is_refused_on_every_rank(rank: int, world_size: int) -> None:
    for form in ("deferred", "zero deferred"):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer, scaler = registered(form, ddp), torch.amp.GradScaler("cpu")

        def loop(ddp: Any = ddp, optimizer: Any = optimizer, scaler: Any = scaler) -> None:
            with Join([ddp, optimizer]):
                for step in range(2 + rank):
                    scaler.scale(ddp(*MLP.batch(step, rank).inputs).square().mean()).backward()
                    scaler.step(optimizer)
                    scaler.update()

        with pytest.raises(TrainingLoopError, match=r"decides after backward.*leave the scaler out under Join"):
            loop()
