"""Gradients that a loop changes between backward and step(), and what it does with two models at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_loops import ADAMW, SGD

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP
from overlap import AllReduce, OverlappedOptimizer, Step, TrainingLoopError, chain


def _backward(ddp: Any, step: int, rank: int) -> None:
    ddp(*MLP.batch(step, rank).inputs).square().mean().backward()


def _replace(ddp: Any) -> None:
    for parameter in ddp.parameters():
        parameter.grad = torch.nan_to_num(parameter.grad) * 0.5


def _evaluate(ddp: Any) -> None:
    ddp(*MLP.batch(7, 0).inputs)  # With gradients enabled; the first one lets DDP rebuild its buckets.


def _skip_by_the_model(ddp: Any) -> None:
    ddp.zero_grad()


def _deferred(rank: int, world_size: int, between: Callable[[Any], None], view: bool) -> None:
    reference, ddp = (wrap(MLP.model(), gradient_as_bucket_view=view, **MLP.ddp_options()) for _ in range(2))
    overlapped = OverlappedOptimizer(ADAMW(ddp.parameters()))
    chain(AllReduce(), Step(overlapped, deferred=True)).register(ddp)
    for model, optimizer in ((reference, ADAMW(reference.parameters())), (ddp, overlapped)):
        for step in range(4):
            _backward(model, step, rank)
            if step != 2:
                between(model)
            optimizer.step()
            optimizer.zero_grad()
    assert_parity(ddp.module.state_dict(), reference.module.state_dict(), what=between.__name__)


@pytest.mark.parametrize("view", [False, True], ids=["copied", "bucket views"])
@pytest.mark.parametrize("between", [_replace, _evaluate, _skip_by_the_model], ids=lambda f: f.__name__.lstrip("_"))
def test_a_deferred_step_takes_gradients_as_the_loop_left_them(between: Callable[[Any], None], view: bool) -> None:
    run_ranks(_deferred, 2, between, view)


def _two_models(rank: int, world_size: int) -> None:
    models = [wrap(MLP.model(), **MLP.ddp_options()) for _ in range(4)]
    plain = SGD([p for model in models[:2] for p in model.parameters()])
    overlapped = OverlappedOptimizer(SGD([p for model in models[2:] for p in model.parameters()]))
    for model in models[2:]:
        chain(AllReduce(), Step(overlapped)).register(model)
    for (first, second), optimizer in ((models[:2], plain), (models[2:], overlapped)):
        _backward(first, 0, rank)
        optimizer.step()
        _backward(second, 1, rank)
        if optimizer is overlapped:
            with pytest.raises(TrainingLoopError, match=r"zero_grad\(\) between backward and"):
                optimizer.zero_grad()
        else:
            first.zero_grad()
        optimizer.step()
    for ours, theirs in zip(models[2:], models[:2], strict=True):
        assert_parity(ours.module.state_dict(), theirs.module.state_dict(), what="a refused zero_grad over two models")


def test_a_zero_grad_that_one_model_refuses_leaves_the_other_as_it_was() -> None:
    run_ranks(_two_models, 2)
