"""What `.grad` holds after an update in backward, and until when."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from step_loops import SGD

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP
from overlap import AllReduce, OverlappedOptimizer, Step, TrainingLoopError, chain

EITHER_VIEW = pytest.mark.parametrize("view", [False, True], ids=["copied", "bucket view"])


def _ddp(view: bool) -> tuple[Any, OverlappedOptimizer]:
    ddp = wrap(MLP.model(), gradient_as_bucket_view=view, **MLP.ddp_options())
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), Step(optimizer)).register(ddp)
    return ddp, optimizer


def _backward(ddp: Any, step: int, rank: int) -> None:
    ddp(*MLP.batch(step, rank).inputs).square().mean().backward()


def _has_all_gradients(ddp: Any) -> bool:
    return all(parameter.grad is not None for parameter in ddp.parameters())


def _readable_then_cleared(rank: int, world_size: int, view: bool) -> None:
    ddp, optimizer = _ddp(view)
    cleared: list[bool] = []
    ddp.module.register_forward_pre_hook(lambda *_: cleared.append(all(p.grad is None for p in ddp.parameters())))
    for step in range(4):
        _backward(ddp, step, rank)
        assert _has_all_gradients(ddp)
        optimizer.step()
        assert _has_all_gradients(ddp)
    assert cleared == [True] * 4


@EITHER_VIEW
def test_gradients_can_be_read_after_backward_and_are_gone_at_the_next_forward(view: bool) -> None:
    run_ranks(_readable_then_cleared, 2, view)


def _evaluated_between_steps(rank: int, world_size: int, view: bool) -> None:
    ddp, optimizer = _ddp(view)
    for step in range(4):
        _backward(ddp, step, rank)
        optimizer.step()
        with torch.no_grad():
            ddp(*MLP.batch(step, rank).inputs)
        assert _has_all_gradients(ddp)


@EITHER_VIEW
def test_an_evaluation_leaves_the_gradients_to_be_logged(view: bool) -> None:
    run_ranks(_evaluated_between_steps, 2, view)


def _stepped_twice(rank: int, world_size: int, view: bool) -> None:
    ddp, optimizer = _ddp(view)
    for step in range(4):
        _backward(ddp, step, rank)
        optimizer.step()
        before = {name: parameter.detach().clone() for name, parameter in ddp.module.named_parameters()}
        with pytest.raises(TrainingLoopError, match=r"optimizer\.step\(\) was called again for a backward"):
            optimizer.step()
        ddp.zero_grad()
        optimizer.step()  # As in plain DDP there is nothing to apply.
        assert_parity(dict(ddp.module.named_parameters()), before, what="parameters after a second step()")


@EITHER_VIEW
def test_a_second_step_after_one_backward_is_an_error_and_changes_nothing(view: bool) -> None:
    run_ranks(_stepped_twice, 2, view)


def _set_to_zero(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(AllReduce(), Step(optimizer := SGD(ddp.parameters()))).register(ddp)
    for step in range(3):
        ddp(*MLP.batch(step, rank).inputs).sum().backward()
        optimizer.zero_grad(set_to_none=False)


def test_gradients_that_the_loop_sets_to_zero_are_not_an_error() -> None:
    run_ranks(_set_to_zero, 2)
