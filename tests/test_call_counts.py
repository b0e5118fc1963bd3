"""How many calls a step makes, on all threads of a rank or on an accelerator, and `step()` alone."""

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import overlap
from benchmarks.host_cost import calls, training
from harness import run_ranks, wrap
from overlap import AllReduce, OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep, chain

_PACKAGE = str(Path(overlap.__file__).parent)
_WARM_UP, _COUNTED = 4, 6

# At most so many calls a step of ten layers of 192 x 192 in four buckets, on two ranks. A few vary, whether the worker
# still has something when the loop asks, so the step with the fewest counts.
MOST = {"AllReduce, Step": 227, "ZeroStep": 613, "ZeroStep, gather in forward": 767}
# The same for one bucket more: a sixth of the calls that ten buckets take above four.
MOST_A_BUCKET = {"AllReduce, Step": 26, "ZeroStep": 119, "ZeroStep, gather in forward": 132}
_CAPS_MB = {4: 0.4, 10: 0.1}


# On an accelerator, at most so many for one bucket more: calls of the package's functions and of functions in C, and
# operations of streams: a record and a wait behind the bucket's gradients.
MOST_ON_STREAMS = {
    "AllReduce": (13, 11, 2),
    "DivideByCount, AllReduce": (15, 17, 2),
    "Cast(bfloat16)": (17, 16, 2),
    "AllReduce, Log": (30, 20, 8),
    "route, AllReduce": (42, 28, 2),
    "AllReduce, Step": (20, 39, 2),
    "AllReduce, Step, deferred": (14, 55, 2),
    "AllReduce, ClipGradNorm, Step": (32, 48, 2),
    "AllReduce, SkipNonFinite, Step": (54, 68, 2),
    "ZeroStep, 8 ranks": (57, 121, 2),
    "PowerSGD(rank=4)": (143, 153, 8),
    "Quantize(Int8()), 8 ranks": (77, 86, 2),
    "Quantize(Int4()), feedback": (134, 200, 11),
}


def _registered(name: str, ddp: Any) -> Any:
    if name == "AllReduce, Step":
        optimizer = OverlappedOptimizer(torch.optim.AdamW(ddp.parameters(), lr=1e-3, fused=True))
        chain(AllReduce(), Step(optimizer)).register(ddp)
        return optimizer
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
    chain(ZeroStep(zero, gather="forward" if "forward" in name else "backward")).register(ddp)
    return zero


def _counts(rank: int, world_size: int, name: str, buckets: int) -> list[int]:
    counts: list[int] = []
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            calls += 1

    threading.setprofile(profile)  # Of the worker's thread, which starts with the registration.
    sys.setprofile(profile)
    ddp = wrap(torch.nn.Sequential(*[torch.nn.Linear(192, 192) for _ in range(10)]), bucket_cap_mb=_CAPS_MB[buckets])
    optimizer = _registered(name, ddp)
    x = torch.randn(4, 192)
    for _ in range(_WARM_UP + _COUNTED):
        calls = 0
        ddp(x).square().mean().backward()
        optimizer.step()
        if hasattr(optimizer, "wait"):
            optimizer.wait()
        counts.append(calls)
    sys.setprofile(None)
    threading.setprofile(None)
    return counts[_WARM_UP:]


def _fewest(name: str, buckets: int) -> int:
    return max(min(counts) for counts in run_ranks(_counts, 2, name, buckets))


@pytest.mark.parametrize("name", MOST)
def test_a_step_and_a_bucket_make_few_calls(name: str) -> None:
    four, ten = _fewest(name, 4), _fewest(name, 10)
    assert four <= MOST[name]
    assert round((ten - four) / 6) <= MOST_A_BUCKET[name], f"{(ten - four) / 6:.1f}"


@pytest.mark.parametrize("name", MOST_ON_STREAMS)
def test_a_bucket_on_an_accelerator_makes_few_calls(name: str) -> None:
    eight, sixteen = calls(name, 8), calls(name, 16)
    made = tuple(round((more - less) / 8) for less, more in zip(eight, sixteen, strict=True))
    assert all(count <= most for count, most in zip(made, MOST_ON_STREAMS[name], strict=True)), made


def test_a_count_makes_twelve_calls_a_pass() -> None:
    with_count, without = calls("DivideByCount, AllReduce", 8).python, calls("AllReduce", 8).python
    assert with_count - without <= 12 + 2 * 8


# Python calls of all code in the loop's `step()`, whatever the number of parameters.
MOST_IN_STEP = {"AllReduce, Step": 67, "AllReduce, Step, deferred": 98, "ZeroStep, 8 ranks": 79}


def _calls_of_step(method: str, buckets: int) -> int:
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    with training(method, buckets) as (ddp, update, x):
        for step in range(_WARM_UP):
            ddp(x).square().mean().backward()
            sys.setprofile(profile if step == _WARM_UP - 1 else None)
            update.step()
            sys.setprofile(None)
            update.clear()
        update.finish()
    return calls


@pytest.mark.parametrize("method", MOST_IN_STEP)
def test_step_makes_no_python_call_for_a_parameter(method: str) -> None:
    assert _calls_of_step(method, 2) == _calls_of_step(method, 6) <= MOST_IN_STEP[method]
