"""LocalSGD.step() after a backward that did not go as planned."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from harness import assert_parity, run_ranks, wrap
from harness.models import MLP
from overlap import AllReduce, Bucket, LocalSGD, Stage, TrainingLoopError

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class _RaisesWhenArmed(Stage):
    """The all-reduce, which raises in the last bucket while it is armed."""

    def __init__(self) -> None:
        self.inner, self.is_armed = AllReduce(), False

    async def __call__(self, bucket: Bucket) -> None:
        await self.inner(bucket)
        if self.is_armed and bucket.is_last:
            raise ValueError("armed")


def _backward(ddp: Any, step: int, rank: int) -> None:
    ddp(*MLP.batch(step, rank).inputs).square().mean().backward()


def _step_after_failure(rank: int, world_size: int) -> None:
    reference, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    plain, reducer = SGD(reference.parameters()), _RaisesWhenArmed()
    local = LocalSGD(ddp, SGD(ddp.parameters()), start_step=100, reducer=reducer)
    for step in range(4):
        reducer.is_armed = step == 2
        if reducer.is_armed:
            with pytest.raises(ValueError, match="armed"):
                _backward(ddp, step, rank)
            with pytest.raises(TrainingLoopError, match=r"the last backward or update raised.*local\.step\(\)"):
                local.step()
            continue
        for model, optimizer in ((reference, plain), (ddp, local)):
            _backward(model, step, rank)
            optimizer.step()
            optimizer.zero_grad()
    assert_parity(ddp.module.state_dict(), reference.module.state_dict(), what="a failed backward left out")


def test_step_after_a_backward_that_raised_is_refused_and_the_loop_goes_on() -> None:
    run_ranks(_step_after_failure, 2)


def _discarded_backward(rank: int, world_size: int) -> None:
    reference, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    for model, optimizer in (
        (reference, SGD(reference.parameters())),
        (ddp, LocalSGD(ddp, SGD(ddp.parameters()), start_step=100)),
    ):
        for step in range(4):
            _backward(model, step, rank)
            if step == 1:
                optimizer.zero_grad()  # A bad batch.
            else:
                optimizer.step()
                optimizer.zero_grad()
    assert_parity(ddp.module.state_dict(), reference.module.state_dict(), what="a batch skipped by zero_grad()")


def test_zero_grad_before_step_discards_the_backward() -> None:
    run_ranks(_discarded_backward, 2)


def _two_backwards(rank: int, world_size: int) -> None:
    reference, ddp = (wrap(MLP.model(), **MLP.ddp_options()) for _ in range(2))
    for model, optimizer in (
        (reference, SGD(reference.parameters())),
        (ddp, LocalSGD(ddp, SGD(ddp.parameters()), start_step=100)),
    ):
        for step in range(3):
            optimizer.zero_grad()
            _backward(model, 2 * step, rank)
            _backward(model, 2 * step + 1, rank)
            optimizer.step()
    assert_parity(ddp.module.state_dict(), reference.module.state_dict(), what="two synchronized backwards a step")


def test_two_synchronized_backwards_add_up_as_in_plain_ddp() -> None:
    run_ranks(_two_backwards, 2)
