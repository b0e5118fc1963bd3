"""What a transform cannot do where it stands is an error with a remedy, before any collective where possible."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import overlap
from bucket_functions import scale
from harness import assert_parity, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    Bucket,
    Cast,
    ClipGradNorm,
    CollectiveError,
    ConfigurationError,
    Log,
    OverlappedOptimizer,
    RegistrationError,
    Stage,
    Step,
    TrainingLoopError,
    ZeroRedundancyOptimizer,
    ZeroStep,
    as_hook,
    as_stage,
    chain,
)
from overlap.hooks import all_reduce

from .by_hand import ADAMW_OPTIONS

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def _looks(bucket: Bucket) -> None:
    pass


async def _waits(bucket: Bucket) -> None:
    await all_reduce(torch.zeros(1))


def _ddp() -> Any:
    return wrap(MLP.model(), **MLP.ddp_options())


def _zero(ddp: Any, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **ADAMW_OPTIONS, **options
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ClipGradNorm(-1.0), "max_norm must be positive, got -1.0"),
        (lambda: ClipGradNorm("1"), "max_norm is a number, got '1'"),
        (lambda: ClipGradNorm(1.0, 0), "norm_type must be positive"),
        (lambda: ClipGradNorm(1.0, error_if_nonfinite=1), "error_if_nonfinite is True or False, got 1"),
    ],
)
def test_arguments_out_of_range_are_refused(make: Callable[[], Stage], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


def _places(rank: int, world_size: int) -> None:
    ddp = _ddp()
    zero, other_zero = _zero(ddp), _zero(ddp)
    plain, overlapped = SGD(ddp.parameters()), OverlappedOptimizer(SGD(ddp.parameters()))
    halves = [SGD(part) for part in (list(ddp.parameters())[:4], list(ddp.parameters())[4:])]
    both = [Step(OverlappedOptimizer(half)) for half in halves]
    clip = ClipGradNorm(1.0)
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: chain(AllReduce(), Step(plain), ClipGradNorm(1.0)), "acts on gradients, and stands after an update"),
        (lambda: chain(AllReduce(), Step(overlapped, deferred=True), _looks), "_looks stands after Step.*after step"),
        (lambda: chain(AllReduce(), Step(overlapped, deferred=True), Log()), "would see the old ones"),
        (lambda: chain(ZeroStep(zero, gather="forward"), Log()), "would see the old ones"),
        (lambda: chain(ZeroStep(other_zero, deferred=True), _looks), "would see the old ones"),
        (lambda: chain(AllReduce(), both[0], _looks, both[1]), "stands between the updates"),
        (
            lambda: chain(ClipGradNorm(1.0), as_stage(default_hooks.allreduce_hook)),
            "after the hook",
        ),
        (lambda: chain(Cast(torch.float64, chain(ClipGradNorm(1.0), AllReduce()))), "inside of another stage"),
    ]
    for make, words in wrong:
        with pytest.raises(ConfigurationError, match=words):
            make().register(ddp)
    with pytest.raises(RegistrationError, match="make a ClipGradNorm for each"):
        chain(clip, AllReduce(), clip).register(ddp)
    registration = chain(AllReduce(), clip).register(ddp)
    with pytest.raises(RegistrationError, match="serves one place of one model"):
        chain(AllReduce(), clip).register(_ddp())
    registration.remove()
    chain(AllReduce(), clip).register(ddp).remove()
    hooked = _ddp()
    hooked.register_comm_hook(None, as_hook(chain(AllReduce(), Log())))
    with pytest.raises(ConfigurationError, match=r"use overlap\.register"):
        mean_squared_error(hooked, MLP.batch(0, rank)).backward()


def _complex(rank: int, world_size: int) -> None:
    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))
            self.line = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.line(x) * self.turn).abs()

    model = Rotation()
    by, ddp = wrap(model), wrap(model)
    chain(AllReduce(), ClipGradNorm(0.05), scale(0.5)).register(ddp)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
    for step in range(3):
        for module in (by, ddp):
            module.zero_grad()
            (module(x) * (step + 1)).sum().backward()
        torch.nn.utils.clip_grad_norm_(by.parameters(), 0.05)
        for parameter in by.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        theirs = {name: parameter.grad for name, parameter in by.module.named_parameters()}
        assert_parity(
            {name: parameter.grad for name, parameter in ddp.module.named_parameters()}, theirs, what="complex"
        )


def _hooks(rank: int, world_size: int) -> None:
    """A function before a hook runs where DDP calls hooks; one that waits there is refused."""
    ddp, by = _ddp(), _ddp()

    def halve(bucket: Bucket) -> None:
        bucket.buffer.mul_(0.5)

    chain(halve, scale(0.5), as_stage(default_hooks.allreduce_hook), ClipGradNorm(0.05)).register(ddp)
    for step in range(3):
        for model in (ddp, by):
            model.zero_grad()
            mean_squared_error(model, MLP.batch(step, rank)).backward()
        for parameter in by.parameters():
            parameter.grad.mul_(0.25)
        torch.nn.utils.clip_grad_norm_(by.parameters(), 0.05)
        theirs = {name: parameter.grad for name, parameter in by.module.named_parameters()}
        assert_parity({name: p.grad for name, p in ddp.module.named_parameters()}, theirs, what="before a hook")
    waiting = _ddp()
    chain(_waits, as_stage(default_hooks.allreduce_hook)).register(waiting)
    with pytest.raises(ConfigurationError, match="awaits something first: put that transform after the hook"):
        mean_squared_error(waiting, MLP.batch(0, rank)).backward()


def _second_backward(rank: int, world_size: int) -> None:
    """Gradients that were clipped, say, are not added to: what a loop would have clipped is the sum."""
    for transform, is_refused in ((ClipGradNorm(0.05), True), (_looks, True), (Log(lambda *_: None), False)):
        ddp = _ddp()
        optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
        chain(AllReduce(), transform, Step(optimizer, deferred=True)).register(ddp)
        mean_squared_error(ddp, MLP.batch(0, rank)).backward()
        if not is_refused:
            mean_squared_error(ddp, MLP.batch(1, rank)).backward()
            optimizer.step()
            continue
        with pytest.raises(TrainingLoopError, match="a second backward began before step"):
            mean_squared_error(ddp, MLP.batch(1, rank)).backward()
        optimizer.zero_grad()
        mean_squared_error(ddp, MLP.batch(1, rank)).backward()
        optimizer.step()


def _skipped_update(rank: int, world_size: int) -> None:
    ddp = _ddp()
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), Step(optimizer), _looks).register(ddp)
    with optimizer.skip_update(), pytest.raises(TrainingLoopError, match="so _looks after it would see old parameters"):
        mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    optimizer.step()


def _scaled(rank: int, world_size: int) -> None:
    for make in (lambda: ClipGradNorm(0.05), None):
        for is_sharded in (False, True):
            ddp = _ddp()
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
            optimizer: Any
            if is_sharded:
                optimizer = _zero(ddp)
                update: Stage = ZeroStep(optimizer, deferred=True)
            else:
                optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
                update = Step(optimizer, deferred=True)
            transform = scale(2.0) if make is None else make()
            chain(AllReduce(), transform, update).register(ddp)
            scaler.scale(mean_squared_error(ddp, MLP.batch(0, rank))).backward()
            if make is None:
                scaler.step(optimizer)
                continue
            with pytest.raises(TrainingLoopError, match=r"has seen scaled gradients.*clip_grad_norm=\.\.\."):
                scaler.step(optimizer)


def _failing(rank: int, world_size: int) -> None:
    """A pass that fails leaves the model usable."""
    ddp = _ddp()
    is_bad = True

    async def boom(bucket: Bucket) -> None:
        if is_bad and rank == 1 and bucket.is_last:
            raise ValueError("boom")
        await all_reduce(torch.zeros(1))

    clip = ClipGradNorm(1e-9, error_if_nonfinite=True)
    chain(clip, AllReduce(), boom).register(ddp)
    with pytest.raises((ValueError, overlap.PeerError), match="boom"):
        mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    is_bad = False
    ddp.zero_grad()
    bad = MLP.batch(0, rank)
    bad.target.fill_(float("nan"))
    with pytest.raises((TrainingLoopError, overlap.PeerError), match="norm of order 2 of the gradients is nan"):
        mean_squared_error(ddp, bad).backward()
    ddp.zero_grad()
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    for parameter in ddp.parameters():
        assert parameter.grad is not None and float(parameter.grad.norm()) <= 1e-9


def _other_options(rank: int, world_size: int) -> None:
    for make in (
        lambda: ClipGradNorm(1.0 + rank),
        lambda: Log(every=1 + rank),
    ):
        stages, ddp = chain(AllReduce(), make()), _ddp()
        with pytest.raises(CollectiveError, match=r"rank 1 registers.*but rank 0 registers"):
            stages.register(ddp)


SCENARIOS = {
    function.__name__.strip("_"): function
    for function in (
        _places, _complex, _hooks, _second_backward, _skipped_update, _scaled, _failing, _other_options,
    )
}  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_refused(scenario: str) -> None:
    run_ranks(SCENARIOS[scenario], 2)
