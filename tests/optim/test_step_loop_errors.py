"""Calls in an order that loses or repeats an update are errors, and the loop can go on after them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harness import run_ranks, wrap
from harness.models import MLP
from overlap import AllReduce, Bucket, OverlappedOptimizer, PeerError, Stage, Step, TrainingLoopError, chain


def _backward(ddp: Any, step: int, rank: int) -> None:
    ddp.zero_grad()
    ddp(*MLP.batch(step, rank).inputs).square().sum().backward()


def _overlapped() -> tuple[Any, OverlappedOptimizer]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))
    chain(AllReduce(), Step(optimizer)).register(ddp)
    return ddp, optimizer


def _second_backward(rank: int, world_size: int) -> None:
    ddp, optimizer = _overlapped()
    _backward(ddp, 0, rank)
    with pytest.raises(TrainingLoopError, match="second backward"):
        ddp(*MLP.batch(1, rank).inputs).square().sum().backward()
    with pytest.raises(TrainingLoopError, match="the last backward or update raised"):
        optimizer.step()
    # The failed backward counts for nothing.
    _backward(ddp, 2, rank)
    optimizer.step()


def test_a_second_backward_without_a_step_is_an_error() -> None:
    run_ranks(_second_backward, 2)


def _cleared_before_step(rank: int, world_size: int) -> None:
    ddp, optimizer = _overlapped()
    _backward(ddp, 0, rank)
    with pytest.raises(TrainingLoopError, match=r"zero_grad\(\) between backward and .*deferred=True"):
        optimizer.zero_grad()
    ddp.zero_grad()  # Plain DDP would skip this update.
    with pytest.raises(TrainingLoopError, match=r"0.weight \(and 9 others\) cannot be changed after backward"):
        optimizer.step()
    optimizer.step()  # Told once; the update stands, and the loop goes on.
    _backward(ddp, 1, rank)
    optimizer.step()


def test_clearing_gradients_that_were_applied_in_backward_is_an_error_before_step() -> None:
    run_ranks(_cleared_before_step, 2)


def _unreduced(rank: int, world_size: int) -> None:
    ddp, optimizer = _overlapped()
    _backward(ddp, 0, rank)
    optimizer.step()
    with ddp.no_sync():
        _backward(ddp, 1, rank)
    with pytest.raises(TrainingLoopError, match="not reduced"):
        optimizer.step()


def test_a_step_on_gradients_that_were_not_reduced_is_an_error() -> None:
    run_ranks(_unreduced, 2)


def _stepped_in_backward(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    plain = torch.optim.SGD(ddp.parameters(), lr=0.1)
    registration = chain(AllReduce(), Step(plain)).register(ddp)
    _backward(ddp, 0, rank)
    with pytest.raises(TrainingLoopError, match="stepped inside backward"):
        plain.step()
    registration.remove()
    plain.step()  # No longer guarded.


def test_a_step_of_a_plain_optimizer_that_backward_steps_is_an_error_until_it_is_removed() -> None:
    run_ranks(_stepped_in_backward, 2)


def _backward_again(rank: int, world_size: int) -> None:
    ddp, optimizer = _overlapped()
    loss = ddp(*MLP.batch(0, rank).inputs).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # DDP would not reduce it, and the weights that it needs are gone.
    optimizer.step()
    optimizer.zero_grad()
    _backward(ddp, 1, rank)
    optimizer.step()


def test_a_second_backward_through_one_graph_is_an_error() -> None:
    run_ranks(_backward_again, 2)


def _missed_parameters(rank: int, world_size: int) -> None:
    ddp, optimizer = _overlapped()
    for step in range(3):
        _backward(ddp, step, rank)
        optimizer.step()
    ddp(*MLP.batch(3, rank).inputs)
    ddp.module[4:](torch.ones(1, 16)).sum().backward()  # The first layers take no part.
    with pytest.raises(TrainingLoopError, match=r"not reached every parameter.*0\.weight.*find_unused_parameters"):
        optimizer.step()


def test_a_backward_that_misses_parameters_is_named_by_step() -> None:
    run_ranks(_missed_parameters, 2)


class _Flaky(Stage):
    """The all-reduce, which raises in bucket 2 of step 2 on one rank."""

    def __init__(self, *, enabled: bool) -> None:
        self.inner, self.enabled = AllReduce(), enabled

    async def __call__(self, bucket: Bucket) -> None:
        if self.enabled and (bucket.step, bucket.index) == (2, 2):
            raise ValueError("the dog ate it")
        await self.inner(bucket)


def _failed_pass(rank: int, world_size: int, deferred: bool) -> list[Any]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))
    chain(_Flaky(enabled=rank == 0), Step(optimizer, deferred=deferred)).register(ddp)
    for step in range(4):
        try:
            ddp(*MLP.batch(step, rank).inputs).square().mean().backward()
        except (ValueError, PeerError) as error:
            warned = any("load a checkpoint" in note for note in error.__notes__)
            assert warned != deferred or rank != 0
            continue
        optimizer.step()
    return [p.detach().clone() for p in ddp.parameters()]


def test_a_failed_pass_with_a_deferred_update_leaves_the_ranks_equal() -> None:
    first, second = run_ranks(_failed_pass, 2, True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


def test_a_failed_pass_with_an_interleaved_update_says_that_some_parameters_were_updated() -> None:
    run_ranks(_failed_pass, 2, False)
