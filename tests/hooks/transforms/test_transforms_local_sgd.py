"""Transforms in LocalSGD."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import assert_parity, plain_step, run_ranks, train, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    ClipGradNorm,
    ConfigurationError,
    LocalSGD,
    SkipNonFinite,
    TrainingLoopError,
    UnsupportedError,
)

from . import by_hand
from .by_hand import ADAMW


def _clipped_step(ddp: Any, optimizer: Any, batch: Any, loss_of: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = loss_of(ddp, batch)
    loss.backward()
    by_hand.clip_norm(ddp)
    optimizer.step()
    return loss


def _local_sgd(rank: int, world_size: int) -> None:
    """The mean is clipped while ranks train together, and each rank's own gradient while they train alone."""
    by, ddp, other = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(3))
    local = LocalSGD(by, ADAMW(by.parameters()), period=2, start_step=2)
    # DDP rebuilds its buckets only where it synchronizes.
    reference = train(by, local, MLP.batches(rank, steps=7), step_fn=_clipped_step, min_buckets=1)
    clip = ClipGradNorm(0.05)
    local = LocalSGD(ddp, ADAMW(ddp.parameters()), period=2, start_step=2, transforms=[clip])
    candidate = train(ddp, local, MLP.batches(rank, steps=7), step_fn=plain_step)
    parameters = [record.parameters for record in candidate]
    assert_parity(parameters, [record.parameters for record in reference], what="LocalSGD")
    assert clip.norm is not None
    with pytest.raises(UnsupportedError, match=r"SkipNonFinite\(\) skips the step on all ranks"):
        LocalSGD(other, ADAMW(other.parameters()), transforms=[SkipNonFinite()])
    with pytest.raises(ConfigurationError, match=r"got AllReduce\(\): give a reducer as reducer="):
        LocalSGD(other, ADAMW(other.parameters()), transforms=[AllReduce()])
    local = LocalSGD(other, torch.optim.SGD(other.parameters(), lr=0.1), start_step=100, transforms=[ClipGradNorm(0.1)])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(mean_squared_error(other, MLP.batch(0, rank))).backward()
    with pytest.raises(TrainingLoopError, match=r"has seen scaled gradients.*Clip in the loop"):
        scaler.step(local)


def test_transforms_of_local_sgd() -> None:
    run_ranks(_local_sgd, 2)
