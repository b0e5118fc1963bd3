"""Transforms under Join, over a resume, in LocalSGD and in the timeline."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import overlap
from bucket_functions import centralize, clip_value, scale
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
    Quantize,
    SkipNonFinite,
    Step,
    Timeline,
    TrainingLoopError,
    UnsupportedError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap._torch.foreach import scale_

from . import by_hand
from .by_hand import ADAMW, ADAMW_OPTIONS

COUNTS = (5, 3)
# DDP keeps the buckets that it begins with, and so does what is rounded by bucket.
KEPT_BUCKETS = {**MLP.ddp_options(), "find_unused_parameters": True}


def _transforms() -> tuple[list[Any], list[Any]]:
    """What stands before the reducer, and after it."""
    return [clip_value(0.05)], [centralize, ClipGradNorm(0.05), SkipNonFinite(), scale(0.9)]


def _edit_by_hand(ddp: Any) -> None:
    by_hand.centralize(ddp)
    by_hand.clip_norm(ddp)
    for parameter in ddp.parameters():
        parameter.grad.mul_(0.9)


def _clip_local(ddp: Any) -> None:
    torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.05)


def _joined(rank: int, world_size: int) -> None:
    """A rank without inputs adds gradients of zero, and clips and updates as the others do."""
    by = wrap(MLP.model(), **MLP.ddp_options())
    plain = ADAMW(by.parameters())
    for step in range(max(COUNTS)):
        plain.zero_grad()
        with by.no_sync():
            loss = mean_squared_error(by, MLP.batch(step, rank))
            (loss if step < COUNTS[rank] else loss * 0.0).backward()
        _clip_local(by)
        for gradient in by_hand.gradients(by):
            gradient.mul_(1 / world_size)
            torch.distributed.all_reduce(gradient)
        _edit_by_hand(by)
        plain.step()
    for form in ("interleaved", "deferred", "sharded, deferred"):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        optimizer: Any
        if form.startswith("sharded"):
            optimizer = ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, partition="parameter", **ADAMW_OPTIONS
            )
            update: Any = ZeroStep(optimizer, deferred="deferred" in form)
        else:
            optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
            update = Step(optimizer, deferred="deferred" in form)
        before, after = _transforms()
        chain(*before, AllReduce(), *after, update).register(ddp)
        with Join([ddp, optimizer]):
            for step in range(COUNTS[rank]):
                mean_squared_error(ddp, MLP.batch(step, rank)).backward()
                optimizer.step()
        assert_parity(ddp.module.state_dict(), by.module.state_dict(), what=f"under Join, {form}")


def test_under_join_a_rank_without_inputs_takes_part() -> None:
    run_ranks(_joined, 2)


def _run(ddp: Any, reports: list[Any]) -> Any:
    optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
    before, after = _transforms()
    log = Log(lambda step, norms: reports.append((step, copy.deepcopy(norms))))
    reducer = Quantize(bits=8, error_feedback=True)
    chain(*before, reducer, *after, log, Step(optimizer)).register(ddp)
    return optimizer


def _saved(rank: int, world_size: int, folder: Path) -> None:
    reports: list[Any] = []
    ddp = wrap(MLP.model(), **KEPT_BUCKETS)
    optimizer = _run(ddp, reports)
    for step in range(6):
        if step == 3:
            torch.save(overlap.state_dict(ddp, optimizer), folder / f"{rank}.pt")
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        optimizer.step()
    torch.save((ddp.module.state_dict(), reports), folder / f"{rank}-whole.pt")


def _resumed(rank: int, world_size: int, folder: Path) -> None:
    reports: list[Any] = []
    ddp = wrap(MLP.model(seed=5), **KEPT_BUCKETS)
    optimizer = _run(ddp, reports)
    overlap.load_state_dict(ddp, optimizer, torch.load(folder / f"{rank}.pt", weights_only=True))
    for step in range(3, 6):
        mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        optimizer.step()
    parameters, every = torch.load(folder / f"{rank}-whole.pt")
    assert_parity(ddp.module.state_dict(), parameters, what="a run that was resumed")
    assert [step for step, _ in reports] == [3, 4, 5]
    assert_parity([norms for _, norms in reports], [norms for _, norms in every[3:]], what="norms")


def test_a_resumed_run_reports_as_one_that_never_stopped(tmp_path: Path) -> None:
    run_ranks(_saved, 2, tmp_path)
    run_ranks(_resumed, 2, tmp_path)


def _sharded_by_itself(rank: int, world_size: int) -> None:
    """Before a sharded update that reduces by itself, what is meant for the mean sees the mean."""
    by = [record.parameters for record in by_hand.reference(MLP, rank, mean=by_hand.clip_norm)]
    for partition in ("element", "parameter"):
        for options in ({}, {"deferred": True}, {"gather": "forward"}):
            candidate = by_hand.with_zero(
                MLP, rank, lambda update: chain(ClipGradNorm(0.05), update), options, partition=partition
            )
            assert_parity(
                candidate, by, what=f"by {partition}, {options}", exact=False, rtol=1e-4, atol=1e-6,
                reason="norms of parts are added up",
            )  # fmt: skip


def test_before_a_sharded_update_that_reduces_by_itself() -> None:
    run_ranks(_sharded_by_itself, 2)


def _several_updates(rank: int, world_size: int) -> None:
    """A step is left out of all updates of a chain."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    parts = list(ddp.parameters())[:4], list(ddp.parameters())[4:]
    optimizers = [OverlappedOptimizer(ADAMW(part)) for part in parts]
    chain(AllReduce(), SkipNonFinite(), *map(Step, optimizers)).register(ddp)
    for step in range(4):
        before = copy.deepcopy(ddp.module.state_dict())
        batch = MLP.batch(step, rank)
        if step == 2 and rank == 1:
            batch.inputs[0][0, 0] = float("inf")
        mean_squared_error(ddp, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
        for name, value in ddp.module.state_dict().items():
            assert torch.equal(value, before[name]) is (step == 2), (name, step)


def test_a_step_is_left_out_of_every_update_of_a_chain() -> None:
    run_ranks(_several_updates, 2)


def _local_sgd(rank: int, world_size: int) -> None:
    """The mean is clipped while ranks train together, and each rank's own gradient while they train alone."""
    by = wrap(MLP.model(), **MLP.ddp_options())
    local = LocalSGD(by, ADAMW(by.parameters()), period=2, start_step=2)

    def step_fn(ddp: Any, optimizer: Any, batch: Any, loss_of: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = loss_of(ddp, batch)
        loss.backward()
        by_hand.clip_norm(ddp)
        optimizer.step()
        return loss

    # DDP rebuilds its buckets only where it synchronizes.
    reference = train(by, local, MLP.batches(rank, steps=7), step_fn=step_fn, min_buckets=1)
    for form in ("after backward", "in backward"):
        ddp = wrap(MLP.model(), **MLP.ddp_options())
        inner: Any = ADAMW(ddp.parameters())
        options: dict[str, Any] = {}
        if form == "in backward":
            inner = OverlappedOptimizer(inner)
            options = {"update": Step(inner)}
        clip = ClipGradNorm(0.05)
        local = LocalSGD(ddp, inner, period=2, start_step=2, transforms=[clip], **options)

        def zeroed(ddp: Any, optimizer: Any, batch: Any, loss_of: Any, form: str = form) -> torch.Tensor:
            if form == "after backward":
                optimizer.zero_grad()
            return overlapped_step(ddp, optimizer, batch, loss_of)

        candidate = train(ddp, local, MLP.batches(rank, steps=7), step_fn=zeroed)
        parameters = [record.parameters for record in candidate]
        assert_parity(parameters, [record.parameters for record in reference], what=f"LocalSGD, {form}")
        assert clip.norm is not None
    other = wrap(MLP.model(), **MLP.ddp_options())
    LocalSGD(other, ADAMW(other.parameters()), start_step=100, transforms=[clip_value(0.1)])
    mean_squared_error(other, MLP.batch(0, rank)).backward()
    with pytest.raises(TrainingLoopError, match="a second backward began"):
        mean_squared_error(other, MLP.batch(1, rank)).backward()
    scaled = wrap(MLP.model(), **MLP.ddp_options())
    local = LocalSGD(
        scaled, torch.optim.SGD(scaled.parameters(), lr=0.1), start_step=100, transforms=[ClipGradNorm(0.1)]
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(mean_squared_error(scaled, MLP.batch(0, rank))).backward()
    with pytest.raises(TrainingLoopError, match=r"has seen scaled gradients.*Clip in the loop"):
        scaler.step(local)
    third = wrap(MLP.model(), **MLP.ddp_options())
    with pytest.raises(UnsupportedError, match=r"SkipNonFinite\(\) skips the step on all ranks"):
        LocalSGD(third, ADAMW(third.parameters()), transforms=[SkipNonFinite()])
    with pytest.raises(ConfigurationError, match=r"got AllReduce\(\): give a reducer as reducer="):
        LocalSGD(third, ADAMW(third.parameters()), transforms=[AllReduce()])


def test_in_local_sgd() -> None:
    run_ranks(_local_sgd, 2)


def _recorded(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
    chain(clip_value(0.1), AllReduce(), scale(0.5), Step(optimizer), Log(lambda *_: None)).register(ddp)
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    optimizer.step()
    with Timeline(ddp) as timeline:
        for step in range(2):
            mean_squared_error(ddp, MLP.batch(step, rank)).backward()
            optimizer.step()
    step = timeline.report().ranks[0][0]
    for bucket in step.buckets:
        assert bucket.reduce is not None and bucket.update is not None
        spans = {one.label: one for one in bucket.activities if one.kind == "transform"}
        assert set(spans) == {"clip_value", "scale", "Log()"}
        assert spans["clip_value"].end_ms <= bucket.reduce.start_ms
        assert bucket.reduce.end_ms <= spans["scale"].start_ms
        assert spans["scale"].end_ms <= bucket.update.start_ms
        assert bucket.update.end_ms <= spans["Log()"].start_ms


def test_the_timeline_shows_where_a_transform_stands() -> None:
    run_ranks(_recorded, 2)


def test_scaling_in_half_precision_is_that_of_mul() -> None:
    values = torch.randn(144, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = values.clone().mul_(0.99)
    scale_([values], 0.99)
    assert torch.equal(values, expected)
