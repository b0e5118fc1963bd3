"""Failures inside the block, and what cannot be recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from harness import run_ranks
from overlap import (
    AllReduce,
    Bucket,
    RegistrationError,
    Timeline,
    TrainingLoopError,
    chain,
)
from overlap.hooks.engine.registration import registration_of
from timeline.training import make_model, run_backward


class Flaky(AllReduce):
    async def __call__(self, bucket: Bucket) -> None:
        await super().__call__(bucket)
        if (bucket.step, bucket.index) == (2, 1):
            raise ValueError("the dog ate it")


def _a_stage_fails(rank: int, world_size: int) -> None:
    ddp = make_model()
    chain(Flaky()).register(ddp)
    with Timeline(ddp) as timeline:
        for step in range(2):
            run_backward(ddp, step, rank)
        with pytest.raises(ValueError, match="the dog"):
            run_backward(ddp, 2, rank)
        for step in range(3, 5):
            run_backward(ddp, step, rank)
    assert len(timeline.steps) == 5


def test_steps_behind_one_that_failed_are_recorded() -> None:
    run_ranks(_a_stage_fails, 2)


def _the_block_fails(rank: int, world_size: int) -> None:
    ddp = make_model()
    registration = chain(AllReduce()).register(ddp)
    broken_off = Timeline(ddp)
    with pytest.raises(KeyError, match="the user's own"):
        _fail_inside(broken_off, lambda: run_backward(ddp, 5, rank))
    assert registration.observer is None and len(ddp.module._forward_pre_hooks) == 0
    assert broken_off.steps == (), "its only step has no end"


def test_an_error_inside_the_block_ends_the_recording() -> None:
    run_ranks(_the_block_fails, 2)


def _the_block_fails_on_plain_ddp(rank: int, world_size: int) -> None:
    ddp = make_model()
    with pytest.raises(KeyError, match="the user's own"):
        _fail_inside(Timeline(ddp), lambda: None)
    assert registration_of(ddp) is None
    run_backward(ddp, 6, rank)


def test_an_error_inside_the_block_leaves_plain_ddp_without_a_stage() -> None:
    run_ranks(_the_block_fails_on_plain_ddp, 2)


def _fail_inside(timeline: Timeline, work: Callable[[], None]) -> None:
    with timeline:
        work()
        raise KeyError("the user's own")


# What is refused ---------------------------------------------------------------------------------------------


def test_a_model_without_ddp_is_refused() -> None:
    with pytest.raises(RegistrationError, match=r"Linear is no.* DistributedDataParallel model"):
        Timeline(torch.nn.Linear(2, 2)).__enter__()  # type: ignore[arg-type]


def _reports_too_early(rank: int, world_size: int) -> None:
    ddp = make_model()
    timeline = Timeline(ddp)
    with pytest.raises(TrainingLoopError, match="when its `with` block is over"):
        timeline.report()
    with timeline:
        run_backward(ddp, 0, rank)
        with pytest.raises(TrainingLoopError, match="when its `with` block is over"):
            timeline.save("step.json")


def test_a_report_before_the_end_of_the_block_is_refused() -> None:
    run_ranks(_reports_too_early, 1)


def _records_twice(rank: int, world_size: int) -> None:
    ddp = make_model()
    timeline = Timeline(ddp)
    with timeline:
        run_backward(ddp, 0, rank)
        with pytest.raises(RegistrationError, match="has an observer already"), Timeline(ddp):
            pass
    with pytest.raises(TrainingLoopError, match="make another for the next"), timeline:
        pass


def test_a_second_timeline_at_once_and_a_second_block_are_refused() -> None:
    run_ranks(_records_twice, 1)


def _has_a_hook_of_its_own(rank: int, world_size: int) -> None:
    ddp = make_model()
    ddp.register_comm_hook(None, _foreign_hook)
    with pytest.raises(RegistrationError, match="_foreign_hook"), Timeline(ddp):
        pass


def _foreign_hook(state, bucket):  # type: ignore[no-untyped-def]
    raise AssertionError


del _foreign_hook.__annotations__


def test_a_model_with_a_hook_that_was_not_registered_with_overlap_is_refused() -> None:
    run_ranks(_has_a_hook_of_its_own, 1)
