"""The training loop that every parity rests on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from on_ranks import gradient, trained

from harness import Record, assert_parity, overlapped_step, run_ranks, run_threads
from harness.models import CASES, MLP, Case

Trained = tuple[Case, list[list[Record]]]


@pytest.mark.parametrize("run", [run_ranks, run_threads])
def test_ddp_averages(run: Any) -> None:
    for result in run(gradient, 2):
        assert torch.equal(result, torch.full((1, 4), 1.5))


@pytest.fixture(scope="module", params=CASES, ids=str)
def processes(request: pytest.FixtureRequest) -> Trained:
    """A model, and what two processes recorded of its training."""
    return request.param, run_ranks(trained, 2, request.param)


def test_processes_and_threads_train_alike(processes: Trained) -> None:
    case, records = processes
    assert_parity(run_threads(trained, 2, case), records, what="records")


def test_the_rate_falls_at_every_step_of_every_model(processes: Trained) -> None:
    _, (records, _) = processes
    assert [record.step for record in records] == [0, 1, 2, 3]
    rates = [record.optimizer["param_groups"][0]["lr"] for record in records]
    assert rates == pytest.approx([0.1 * 0.9**steps for steps in (1, 2, 3, 4)])


def test_every_model_learns_so_that_records_differ_in_parameters(processes: Trained) -> None:
    _, ((first, *_, last), _) = processes
    with pytest.raises(AssertionError, match="parameters"):
        assert_parity(replace(last, step=0, loss=first.loss.clone()), first, what="the first and last step")


def test_a_forgotten_zero_grad_shows() -> None:
    candidate = run_threads(lambda *args: trained(*args, step_fn=overlapped_step), 2, MLP)
    with pytest.raises(AssertionError, match=r"\[0\]\[1\] \(step 1\)\.parameters"):
        assert_parity(candidate, run_threads(trained, 2, MLP), what="training")
