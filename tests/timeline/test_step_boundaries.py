"""What is a step, and which part of it is what."""

from __future__ import annotations

import time

import pytest
import torch
from torch.distributed.algorithms.join import Join

from harness import run_ranks, run_threads, wrap
from harness.models import BATCH_NORM, MLP
from overlap import (
    AllReduce,
    Timeline,
    chain,
)
from overlap.timeline import StepReport
from timeline.training import make_model, run_backward


def _accumulates_and_evaluates(rank: int, world_size: int) -> tuple[StepReport, ...]:
    """An evaluation behind the first step, two forwards in the second, the third under no_sync, no last backward."""
    ddp = wrap(BATCH_NORM.model(), **BATCH_NORM.ddp_options())
    run_backward(ddp, 0, rank)
    with Timeline(ddp) as timeline:
        run_backward(ddp, 0, rank)
        with torch.no_grad():
            ddp(*MLP.batch(0, rank).inputs)
            time.sleep(0.05)
        (ddp(*MLP.batch(1, rank).inputs) + ddp(*MLP.batch(2, rank).inputs)).sum().backward()
        with ddp.no_sync():
            run_backward(ddp, 3, rank)
        run_backward(ddp, 4, rank)
        ddp(*MLP.batch(5, rank).inputs)
    return timeline.steps


@pytest.fixture(scope="module", params=[0, 1], ids=["rank 0", "rank 1"])
def steps(request: pytest.FixtureRequest, _steps_on_two_ranks: list[tuple[StepReport, ...]]) -> tuple[StepReport, ...]:
    """What one rank has of an accumulation, an evaluation and a step with two forwards."""
    return _steps_on_two_ranks[request.param]


@pytest.fixture(scope="module")
def _steps_on_two_ranks() -> list[tuple[StepReport, ...]]:
    return run_ranks(_accumulates_and_evaluates, 2)


def test_forwards_before_one_backward_are_one_step(steps: tuple[StepReport, ...]) -> None:
    assert [len(step.in_phase("forward")) for step in steps] == [1, 2, 1, 1, 1]
    assert [len(step.in_phase("backward")) for step in steps] == [1, 1, 1, 1, 0]


def test_a_step_under_no_sync_has_no_buckets(steps: tuple[StepReport, ...]) -> None:
    assert [bool(step.buckets) for step in steps] == [True, True, False, True, False]


def test_a_forward_without_gradients_is_not_part_of_a_step(steps: tuple[StepReport, ...]) -> None:
    between_ms = steps[1].start_ms - (steps[0].start_ms + steps[0].step_ms)
    assert between_ms >= 50


def test_broadcasts_of_buffers_are_recorded_and_exposed(steps: tuple[StepReport, ...]) -> None:
    # Under no_sync DDP leaves the buffers of the next forward as they are.
    assert [bool(step.in_phase("buffers")) for step in steps] == [True, True, True, False, True]
    assert steps[0].exposed_ms >= steps[0].phase_ms("buffers")


def _waits_inside_backward(rank: int, world_size: int) -> None:
    ddp = make_model()
    chain(AllReduce()).register(ddp)
    with Timeline(ddp) as timeline:
        for step in range(3):
            run_backward(ddp, step, rank)
    for own in timeline.steps:
        waits, (backward,) = own.in_phase("wait"), own.in_phase("backward")
        assert len(waits) == len(own.buckets)
        assert all(backward.start_ms < wait.start_ms <= wait.end_ms < backward.end_ms for wait in waits)
        assert own.exposed_ms >= own.phase_ms("wait") > 0


def test_where_the_training_thread_drives_the_stages_its_waits_are_exposed() -> None:
    run_threads(_waits_inside_backward, 2)


def _has_uneven_inputs(rank: int, world_size: int) -> tuple[list[int], torch.Tensor]:
    ddp = make_model()
    with Timeline(ddp) as timeline, Join([ddp]):
        for step in range(2 + 2 * rank):
            run_backward(ddp, step, rank)
    report = timeline.report()
    assert all(step.buckets for step in report.steps)
    return [len(steps) for steps in report.ranks], next(ddp.parameters()).detach()


def test_a_rank_that_has_run_out_of_inputs_has_no_more_steps() -> None:
    for counts, _ in run_ranks(_has_uneven_inputs, 2):
        assert counts == [2, 4]


def _is_compiled_inside(rank: int, world_size: int) -> None:
    ddp = wrap(torch.compile(MLP.model(), backend="eager"), bucket_cap_mb=25)  # type: ignore[arg-type]
    with Timeline(ddp) as timeline:
        for step in range(3):
            run_backward(ddp, step, rank)
    assert [phase.name for phase in timeline.steps[-1].phases] == ["forward", "loss", "backward", "finalization"]


def test_a_compiled_module_is_recorded() -> None:
    run_ranks(_is_compiled_inside, 1)


class _NotATensor:
    def __init__(self, output: torch.Tensor) -> None:
        self.output = output


class _Wrapped(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP.model()

    def forward(self, inputs: torch.Tensor) -> _NotATensor:
        return _NotATensor(self.inner(inputs))


def _backward_begins_with_the_first_bucket(rank: int, world_size: int) -> None:
    ddp = wrap(_Wrapped(), **MLP.ddp_options())
    with Timeline(ddp) as timeline:
        for step in range(3):
            ddp(*MLP.batch(step, rank).inputs).output.sum().backward()
    for own in timeline.steps[1:]:
        assert own.backward is not None and own.backward.start_ms <= own.buckets[0].ready_ms
        assert own.in_phase("finalization")


def test_an_output_that_hides_its_tensors_loses_only_the_start_of_backward() -> None:
    run_ranks(_backward_begins_with_the_first_bucket, 1)
