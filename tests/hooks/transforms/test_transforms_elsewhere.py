"""Transforms under Join, in LocalSGD and in the timeline."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from bucket_functions import clip_value, scale
from harness import assert_parity, overlapped_step, run_ranks, train, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    ClipGradNorm,
    ConfigurationError,
    Join,
    LocalSGD,
    Log,
    OverlappedOptimizer,
    SkipNonFinite,
    Step,
    Timeline,
    TrainingLoopError,
    UnsupportedError,
    chain,
)

from . import by_hand
from .by_hand import ADAMW

COUNTS = (5, 3)


def _joined(rank: int) -> None:
    """A rank without inputs adds gradients of zero, and clips and updates as the others do."""
    by, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    plain = ADAMW(by.parameters())
    for step in range(max(COUNTS)):
        plain.zero_grad()
        with by.no_sync():
            loss = mean_squared_error(by, MLP.batch(step, rank))
            (loss if step < COUNTS[rank] else loss * 0.0).backward()
        torch.nn.utils.clip_grad_value_(by.parameters(), 0.05)
        for gradient in by_hand.gradients(by):
            gradient.mul_(1 / len(COUNTS))
            torch.distributed.all_reduce(gradient)
        by_hand.clip_norm(by)
        plain.step()
    optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
    chain(clip_value(0.05), AllReduce(), ClipGradNorm(0.05), SkipNonFinite(), Step(optimizer)).register(ddp)
    with Join([ddp, optimizer]):
        for step in range(COUNTS[rank]):
            mean_squared_error(ddp, MLP.batch(step, rank)).backward()
            optimizer.step()
    assert_parity(ddp.module.state_dict(), by.module.state_dict(), what="under Join")


def _clipped_step(ddp: Any, optimizer: Any, batch: Any, loss_of: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = loss_of(ddp, batch)
    loss.backward()
    by_hand.clip_norm(ddp)
    optimizer.step()
    return loss


def _local_sgd(rank: int) -> None:
    """The mean is clipped while ranks train together, and each rank's own gradient while they train alone."""
    by, ddp, other = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(3))
    local = LocalSGD(by, ADAMW(by.parameters()), period=2, start_step=2)
    # DDP rebuilds its buckets only where it synchronizes.
    reference = train(by, local, MLP.batches(rank, steps=7), step_fn=_clipped_step, min_buckets=1)
    inner = OverlappedOptimizer(ADAMW(ddp.parameters()))
    clip = ClipGradNorm(0.05)
    local = LocalSGD(ddp, inner, period=2, start_step=2, transforms=[clip], update=Step(inner))
    candidate = train(ddp, local, MLP.batches(rank, steps=7), step_fn=overlapped_step)
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


def _recorded(rank: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
    chain(clip_value(0.1), AllReduce(), scale(0.5), Step(optimizer), Log(lambda *_: None)).register(ddp)
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    optimizer.step()
    with Timeline(ddp) as timeline:
        for step in range(2):
            mean_squared_error(ddp, MLP.batch(step, rank)).backward()
            optimizer.step()
    for bucket in timeline.report().ranks[0][0].buckets:
        assert bucket.reduce is not None and bucket.update is not None
        spans = {one.label: one for one in bucket.activities if one.kind == "transform"}
        in_order = [spans["clip_value"], bucket.reduce, spans["scale"], bucket.update, spans["Log()"]]
        for one, other in itertools.pairwise(in_order):
            assert one.end_ms <= other.start_ms


def _play(rank: int, world_size: int) -> None:
    for scenario in (_joined, _local_sgd, _recorded):
        scenario(rank)


def test_join_local_sgd_and_the_timeline() -> None:
    run_ranks(_play, 2)
