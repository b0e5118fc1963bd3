"""Some of the checks on the CPU, so that they are known to run; that they can fail; and what becomes of a failure."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gpu
import overlap
from harness import on_ranks
from streams.scenarios import SCENARIOS, Scenario, adamw

from . import runner
from .checks import CHECKS, Check, no_race, parity
from .host_waits import waits_within


@pytest.mark.parametrize("subject", ["resources", "sharded, in the next forward"])
def test_what_a_gpu_is_for_is_skipped_on_the_cpu_and_the_rest_passes(subject: str) -> None:
    results = {one.topic: one for one in runner.run_subject(subject, "cpu")}
    _, topics = CHECKS[subject]
    expected = {topic: "skipped" if check.needs_gpu else "passed" for topic, check in topics.items()}
    assert {topic: one.outcome for topic, one in results.items()} == expected, runner.summary([*results.values()])


def _passes(scenario: Scenario, rank: int, device: torch.device) -> None:
    dist.all_reduce(torch.ones(1, device=device))


def _fails(scenario: Scenario, rank: int, device: torch.device) -> None:
    if rank == 1:
        raise ValueError("rank 1 cannot")


def test_a_check_that_does_not_pass_costs_those_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    topics = {"first": Check(run=_passes), "second": Check(run=_fails), "third": Check(run=_passes)}
    monkeypatch.setattr(runner, "CHECKS", {"mine": (SCENARIOS["all-reduce, interleaved"], topics)})
    monkeypatch.setattr(runner, "_run", lambda *args: _run_with(topics, *args))
    results = runner.run_subject("mine", "cpu")
    assert [one.outcome for one in results] == ["passed", "failed", "skipped"]
    assert "rank 1 cannot" in results[1].detail and "second: mine failed" in runner.summary(results)


def _run_with(topics: dict[str, Check], rank: int, world_size: int, subject: str, device: str, passed: Path) -> None:
    runner.CHECKS = {subject: (SCENARIOS["all-reduce, interleaved"], topics)}
    run(rank, world_size, subject, device, passed)


run = runner._run


def test_checks_need_nothing_but_torch() -> None:
    absent = ["pytest", "cloudpickle", "hypothesis", "tqdm", "rich", "matplotlib", "torchvision", "sklearn"]
    without = f"import sys; sys.modules.update(dict.fromkeys({absent}))"
    code = f"{without}; from gpu.__main__ import CHECKS; print(len(CHECKS))"
    folders = [str(Path(gpu.__file__).parents[1]), str(Path(overlap.__file__).parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    output = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    assert int(output) == len(CHECKS)


def _another_result_each_time(ddp: Any) -> list[Any]:
    (optimizer,) = adamw(ddp)
    for group in optimizer.param_groups:
        group["lr"] = time.monotonic()
    return [optimizer]


@on_ranks(2)
def test_a_wrong_update_and_a_result_that_depends_on_time_fail(rank: int, world_size: int) -> None:
    device = torch.device("cpu")
    wrong = dataclasses.replace(SCENARIOS["all-reduce, interleaved"], build=_another_result_each_time)
    with pytest.raises(AssertionError, match="beside plain DDP"):
        parity(wrong, rank, device)
    with pytest.raises(AssertionError, match=r"late stages: \d+ of"):
        no_race(wrong, rank, device)


def _event(name: str, ts: float, *, cat: str = "cuda_runtime", tid: int = 1, dur: float = 1.0) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid}


_STAGE = _event("overlap::Step[bucket 0]", 10, cat="user_annotation", dur=5)
_LAUNCH = _event("cudaLaunchKernel", 11)


def test_a_wait_is_the_librarys_where_it_begins_within_one_of_its_ranges() -> None:
    elsewhere = [
        {**_STAGE, "cat": "gpu_user_annotation", "ts": 20},
        _event("cudaStreamSynchronize", 16),
        _event("cudaStreamSynchronize", 12, tid=2),
        _event("cudaDeviceSynchronize", 21),
        _event("overlap::inner", 12, cat="cpu_op"),
    ]
    assert waits_within([_STAGE, _LAUNCH, *elsewhere]) == {}
    inside = [_event("cudaStreamSynchronize", 14), _event("cudaMemcpy", 13)]
    expected = {"overlap::Step[bucket 0]": ["cudaStreamSynchronize", "cudaMemcpy"]}
    assert waits_within([_STAGE, _LAUNCH, *inside]) == expected


@pytest.mark.parametrize(("events", "missing"), [([_LAUNCH], "no range"), ([_STAGE], "no call of the CUDA runtime")])
def test_a_trace_in_which_nothing_was_watched_proves_nothing(events: list[dict[str, Any]], missing: str) -> None:
    with pytest.raises(AssertionError, match=missing):
        waits_within(events)
