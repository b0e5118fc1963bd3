"""What becomes of checks that fail, die or hang, and that checks of chains can fail."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

import gpu
import overlap
from overlap import AllReduce, OverlappedOptimizer, Step
from overlap import chain as chained

from .chains import CHAINS, Chain
from .check import Check
from .host_waits import traced, waits_within
from .lateness import LATE_STAGES
from .parity import ExactSums, Parity
from .races import NoRace
from .runner import run_checks, summary


def _adds_up(rank: int, world_size: int, device: torch.device) -> dict[str, float]:
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    return {"total": float(total), "pid": os.getpid()}


def _fails_on_rank_1(rank: int, world_size: int, device: torch.device) -> None:
    if rank == 1:
        raise ValueError("rank 1 cannot")
    dist.all_reduce(torch.ones(1, device=device))


def _dies_on_rank_1(rank: int, world_size: int, device: torch.device) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1, device=device))


def _hangs(rank: int, world_size: int, device: torch.device) -> None:
    time.sleep(1000)


def _check(name: str, run: Any, **fields: Any) -> Check:
    return Check(name=name, topic="parity", run=run, **fields)


def test_a_check_that_does_not_pass_costs_its_own_result() -> None:
    table = [
        _check("first", _adds_up),
        _check("second", _adds_up),
        _check("fails", _fails_on_rank_1),
        _check("dies", _dies_on_rank_1),
        _check("hangs", _hangs, timeout_s=0.5),
        _check("last", _adds_up),
        _check("elsewhere", _adds_up, devices=("cuda",)),
        _check("three", _adds_up, ranks=3),
    ]
    results = {result.name: result for result in run_checks(table, "cpu")}
    outcomes = {name: result.outcome for name, result in results.items()}
    assert outcomes == {
        "first": "passed", "second": "passed", "fails": "failed", "dies": "died", "hangs": "hung",
        "last": "passed", "elsewhere": "skipped", "three": "passed",
    }  # fmt: skip
    pids = {name: result.figures.get("pid") for name, result in results.items()}
    assert pids["first"] == pids["second"] != pids["last"] is not None
    assert results["three"].figures["total"] == 3
    assert "rank 1: " in results["fails"].detail and "ValueError: rank 1 cannot" in results["fails"].detail
    assert "exit code -9" in results["dies"].detail
    assert "no answer after" in results["hangs"].detail
    assert results["elsewhere"].detail == "it needs cuda"
    assert "4 passed, 1 failed, 1 died, 1 hung, 1 skipped" in summary(list(results.values()))


def test_checks_need_nothing_but_torch() -> None:
    absent = ["pytest", "cloudpickle", "hypothesis", "tqdm", "rich", "matplotlib", "torchvision", "sklearn"]
    without = f"import sys; sys.modules.update(dict.fromkeys({absent}))"
    code = f"{without}; from gpu.__main__ import checks; print(len(checks()))"
    folders = [str(Path(gpu.__file__).parents[1]), str(Path(overlap.__file__).parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    output = subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout
    assert int(output) > 300


def _faster(ddp: Any) -> list[Any]:
    optimizer = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=0.011, weight_decay=0.1, fused=True))
    chained(AllReduce(), Step(optimizer)).register(ddp)
    return [optimizer]


def _wrong_update(rank: int, world_size: int, device: torch.device) -> None:
    wrong = dataclasses.replace(CHAINS["AllReduce, Step"], build=_faster)
    with patch.dict(CHAINS, wrong=wrong), pytest.raises(AssertionError, match="is not the update by hand"):
        Parity("wrong")(rank, world_size, device)


def _halved(rank: int, world_size: int, device: torch.device) -> None:
    def half(bucket: Any) -> None:
        bucket.buffer.mul_(0.5)

    with (
        patch("gpu.parity.AllReduce", lambda: chained(AllReduce(), half)),
        pytest.raises(AssertionError, match="at 4 ranks"),
    ):
        ExactSums("AllReduce, Step")(rank, world_size, device)


def _another_result_when_late(rank: int, world_size: int, device: torch.device) -> None:
    rates = itertools.chain([0.1], itertools.repeat(0.2))

    def build(ddp: Any) -> list[Any]:
        optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=next(rates)))
        chained(AllReduce(), Step(optimizer)).register(ddp)
        return [optimizer]

    with (
        patch.dict(CHAINS, late=Chain(name="late", build=build)),
        pytest.raises(AssertionError, match=f"late, {LATE_STAGES}: losses: . of 5 differ"),
    ):
        NoRace("late")(rank, world_size, device)


def _nothing_late(rank: int, world_size: int, device: torch.device) -> None:
    with patch("gpu.lateness._around_collectives"), pytest.raises(AssertionError, match="nothing was made late"):
        NoRace("AllReduce, Step")(rank, world_size, device)


@contextmanager
def _profiler_of_the_host() -> Iterator[None]:
    def nothing(*_: Any) -> None:
        pass

    with (
        patch.multiple(torch.cuda, synchronize=nothing, set_sync_debug_mode=nothing, get_sync_debug_mode=nothing),
        patch("gpu.host_waits.profile", lambda activities: profile(activities=[ProfilerActivity.CPU])),
    ):
        yield


def test_checks_of_chains_fail_where_a_chain_is_wrong() -> None:
    table = [
        _check("wrong update", _wrong_update),
        _check("halved", _halved, ranks=4),
        _check("another result when late", _another_result_when_late),
        _check("nothing late", _nothing_late),
    ]
    for result in run_checks(table, "cpu"):
        assert result.outcome == "passed", result.detail


def _event(name: str, ts: float, *, cat: str = "cuda_runtime", tid: int = 1, dur: float = 1.0) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": tid}


_STAGE = _event("overlap::Step[bucket 0]", 10, cat="user_annotation", dur=5)
_LAUNCH = _event("cudaLaunchKernel", 11)


def test_a_wait_is_the_librarys_where_it_begins_within_one_of_its_ranges() -> None:
    on_the_gpu = {**_STAGE, "cat": "gpu_user_annotation", "ts": 20}
    elsewhere = [
        _event("cudaStreamSynchronize", 16),
        _event("cudaStreamSynchronize", 12, tid=2),
        _event("cudaDeviceSynchronize", 21),
        _event("overlap::inner", 12, cat="cpu_op"),
    ]
    assert waits_within([_STAGE, on_the_gpu, _LAUNCH, *elsewhere]) == {}
    inside = [_event("cudaStreamSynchronize", 14), _event("cudaMemcpy", 13)]
    expected = {"overlap::Step[bucket 0]": ["cudaStreamSynchronize", "cudaMemcpy"]}
    assert waits_within([_STAGE, on_the_gpu, _LAUNCH, *elsewhere, *inside[:1]]) == {
        name: calls[:1] for name, calls in expected.items()
    }
    assert waits_within([_STAGE, _LAUNCH, *inside]) == expected


def test_labels_are_in_a_trace_of_the_profiler_as_they_are_looked_for() -> None:
    def labelled() -> None:
        with record_function("overlap::stage"):
            torch.ones(3).add_(1)

    with _profiler_of_the_host():
        events = traced(labelled)
    (stage,) = (event for event in events if event["name"] == "overlap::stage")
    wait = _event("cudaStreamSynchronize", stage["ts"] + stage["dur"] / 2, tid=stage["tid"])
    assert waits_within([*events, wait]) == {"overlap::stage": ["cudaStreamSynchronize"]}


@pytest.mark.parametrize(("events", "missing"), [([_LAUNCH], "no range"), ([_STAGE], "no call of the CUDA runtime")])
def test_a_trace_in_which_nothing_was_watched_proves_nothing(events: list[dict[str, Any]], missing: str) -> None:
    with pytest.raises(AssertionError, match=missing):
        waits_within(events)
