"""Long runs, made short: nothing grows, and what leaks on purpose is found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from soak.long_run import samples_of
from soak.slopes import MEASURES, Sample, growing, judged, markdown

STEPS, SAMPLES = 200, 20
# A few hundred steps on a machine with other work say little of time; and memory comes in pages and arenas.
_SHORT = [replace(measure, bound=1.0 if measure.name == "CPU time" else measure.bound) for measure in MEASURES]


def _grown(form: str, leak: Callable[[int, dist.Store], object] | None = None) -> list[str]:
    return growing(judged(form, samples_of(form, steps=STEPS, samples=SAMPLES, leak=leak), _SHORT))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "form", ["chain, Step", "ZeroStep, gathered in forward", "LocalSGD, overlapped", "Join, polled"]
)
def test_nothing_grows(form: str) -> None:
    assert _grown(form) == []


_kept: list[Any] = []


def _keep_memory(step: int, store: dist.Store) -> None:
    _kept.append(torch.ones(2**16))


def _keep_a_thread(step: int, store: dist.Store) -> None:
    if step % 20 == 0:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


@pytest.mark.parametrize(
    ("leak", "named"),
    [
        (_keep_memory, "memory"),
        (_keep_a_thread, "threads"),
    ],
)
def test_what_leaks_on_purpose_is_found(leak: Callable[[int, dist.Store], object], named: str) -> None:
    assert any(text.startswith(f"{named} on rank") for text in _grown("plain DDP", leak))


def _sample(step: int, **other: float) -> Sample:
    return {"step": step, "time": 0.002, **{measure.name: 1000.0 for measure in MEASURES}, **other}


def test_a_slope_that_does_not_matter_is_flat_and_one_that_does_is_in_bold() -> None:
    def run(bytes_per_step: float) -> dict[str, Any]:
        rank = [_sample(100 * place, memory=1e6 + bytes_per_step * 100 * place) for place in range(200)]
        return judged("chain, Step", [rank, rank])

    few, many = run(10), run(1000)
    assert growing(few) == []
    assert [text.partition(":")[0] for text in growing(many)] == ["memory on rank 0"]
    assert "**9.8e+02 ± 0**" in markdown([many]) and "**" not in markdown([few])
    assert "1 of 2 forms are flat over 19,900 steps" in markdown([few, many])
