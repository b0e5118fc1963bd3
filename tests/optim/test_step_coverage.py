"""Optimizer and model: which parameters they share, which are frozen, and how many models a step serves."""

from __future__ import annotations

import pytest
import torch
from step_loops import SGD
from torch import nn

from harness import run_ranks, run_threads, wrap
from harness.models import MLP
from overlap import (
    AllReduce,
    ConfigurationError,
    OverlappedOptimizer,
    RegistrationError,
    Step,
    TrainingLoopError,
    chain,
)


def _optimizer_of_another_model(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    with pytest.raises(ConfigurationError, match="no parameter of this model; build it from"):
        chain(AllReduce(), Step(SGD(MLP.model().parameters()))).register(ddp)


def test_an_optimizer_of_another_model_is_refused() -> None:
    run_threads(_optimizer_of_another_model, 2)


def _plain_optimizer_with_more(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    outside = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigurationError, match="1 parameters of the SGD are not in this model"):
        chain(AllReduce(), Step(SGD([*ddp.parameters(), outside]))).register(ddp)


def test_a_plain_optimizer_with_parameters_outside_of_the_model_is_refused() -> None:
    run_threads(_plain_optimizer_with_more, 2)


def _second_model(rank: int, world_size: int) -> None:
    first, second = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    optimizer = OverlappedOptimizer(SGD([*first.parameters(), *second.parameters()]))
    stages = chain(AllReduce(), Step(optimizer, clip_grad_norm=1e-9))
    stages.register(first)
    with pytest.raises(RegistrationError, match="serves a model already; make a Step for each model"):
        stages.register(second)
    before = [p.detach().clone() for p in first.parameters()]
    first(*MLP.batch(0, rank).inputs).sum().backward()
    optimizer.step()
    for ours, old in zip(first.parameters(), before, strict=True):
        torch.testing.assert_close(ours, old, atol=1e-8, rtol=0)  # Clipped as before.


def test_a_second_model_is_refused_and_the_first_one_trains_on() -> None:
    run_ranks(_second_model, 2)


def _unfrozen_after_wrapping(rank: int, world_size: int) -> None:
    model = MLP.model()
    model[0].requires_grad_(False)
    ddp = wrap(model, **MLP.ddp_options())
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), Step(optimizer)).register(ddp)
    ddp.module[0].requires_grad_(True)  # DDP does not reduce it, so the ranks would part here.
    ddp(*MLP.batch(0, rank).inputs).sum().backward()
    with pytest.raises(TrainingLoopError, match=r"not reduced over ranks \(0\.weight \(and 1 other\)\)"):
        optimizer.step()


def test_parameters_unfrozen_after_wrapping_are_refused_by_name() -> None:
    run_ranks(_unfrozen_after_wrapping, 2)
