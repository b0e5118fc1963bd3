"""What a transform cannot do where it stands is an error with a remedy, before any collective where possible."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness import on_ranks, plain_step, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    Bucket,
    Cast,
    ClipGradNorm,
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
    chain,
)

from .by_hand import ADAMW_OPTIONS

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def _looks(bucket: Bucket) -> None:
    pass


def _ddp() -> Any:
    return wrap(MLP.model(), **MLP.ddp_options())


def _zero(ddp: Any, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **ADAMW_OPTIONS, **options
    )


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ClipGradNorm(-1.0), "max_norm must be a positive number.*got -1.0"),
        (lambda: ClipGradNorm("1"), "max_norm must be a positive number.*got '1'"),
        (lambda: ClipGradNorm(1.0, 0), "norm_type must be a positive number"),
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
        (lambda: chain(AllReduce(), Step(overlapped, deferred=True), Log(print)), "would see the old ones"),
        (lambda: chain(ZeroStep(zero, gather="forward"), Log(print)), "would see the old ones"),
        (lambda: chain(ZeroStep(other_zero, deferred=True), _looks), "would see the old ones"),
        (lambda: chain(AllReduce(), both[0], _looks, both[1]), "stands between the updates"),
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
    hooked.register_comm_hook(None, as_hook(chain(AllReduce(), Log(print))))
    with pytest.raises(ConfigurationError, match=r"use overlap\.register"):
        mean_squared_error(hooked, MLP.batch(0, rank)).backward()


def _scaled(rank: int, world_size: int) -> None:
    ddp = _ddp()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    zero = _zero(ddp)
    chain(AllReduce(), ClipGradNorm(0.05), ZeroStep(zero, deferred=True)).register(ddp)
    scaler.scale(mean_squared_error(ddp, MLP.batch(0, rank))).backward()
    with pytest.raises(TrainingLoopError, match=r"has seen scaled gradients.*clip in the loop"):
        scaler.step(zero)


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
        plain_step(ddp, optimizer, MLP.batch(1, rank), mean_squared_error)


def _skipped_update(rank: int, world_size: int) -> None:
    ddp = _ddp()
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), Step(optimizer), _looks).register(ddp)
    with optimizer.skip_update(), pytest.raises(TrainingLoopError, match="so _looks after it would see old parameters"):
        mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    optimizer.step()


@on_ranks(2)
def test_where_a_transform_cannot_work_it_is_refused(rank: int, world_size: int) -> None:
    for scenario in (_places, _second_backward, _skipped_update, _scaled):
        scenario(rank, world_size)
