"""The training loop that every parity rests on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from on_ranks import gradient, trained

from harness import Record, assert_parity, overlapped_step, run_ranks, run_threads
from harness.models import CASES, MLP


@pytest.mark.parametrize("run", [run_ranks, run_threads])
def test_ddp_averages(run: Any) -> None:
    for result in run(gradient, 2):
        assert torch.equal(result, torch.full((1, 4), 1.5))


def _trained(rank: int, world_size: int) -> dict[str, list[Record]]:
    return {case.name: trained(rank, world_size, case) for case in CASES}


def test_processes_and_threads_train_every_model_alike_and_it_learns() -> None:
    records = run_ranks(_trained, 2)
    assert_parity(run_threads(_trained, 2), records, what="records")
    for of_case in records[0].values():
        assert [record.step for record in of_case] == [0, 1, 2, 3]
        rates = [record.optimizer["param_groups"][0]["lr"] for record in of_case]
        assert rates == pytest.approx([0.1 * 0.9**steps for steps in (1, 2, 3, 4)])
        first, last = of_case[0], of_case[-1]
        with pytest.raises(AssertionError, match="parameters"):
            assert_parity(replace(last, step=0, loss=first.loss.clone()), first, what="the first and last step")


def test_a_forgotten_zero_grad_shows() -> None:
    candidate = run_threads(lambda *args: trained(*args, step_fn=overlapped_step), 2, MLP)
    with pytest.raises(AssertionError, match=r"\[0\]\[1\] \(step 1\)\.parameters"):
        assert_parity(candidate, run_threads(trained, 2, MLP), what="training")
