"""Long runs, made short: nothing grows, and what leaks on purpose is found."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from soak.long_run import samples_of
from soak.slopes import MEASURES, Sample, fitted, growing, judged, markdown

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


def _keep_objects(step: int, store: dist.Store) -> None:
    _kept.append([{} for _ in range(8)])


def _keep_a_thread(step: int, store: dist.Store) -> None:
    if step % 20 == 0:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def _keep_a_descriptor(step: int, store: dist.Store) -> None:
    if step % 20 == 0:
        _kept.append(os.open("/dev/null", os.O_RDONLY))


def _keep_a_key(step: int, store: dist.Store) -> None:
    store.set(f"step {step}", "")


def _take_longer(step: int, store: dist.Store) -> None:
    end_s = time.thread_time() + step * 1e-4
    while time.thread_time() < end_s:
        pass


@pytest.mark.parametrize(
    ("leak", "named"),
    [
        (_keep_memory, "memory"),
        (_keep_objects, "Python blocks"),
        (_keep_a_thread, "threads"),
        (_keep_a_descriptor, "descriptors"),
        (_keep_a_key, "store keys"),
        (_take_longer, "CPU time"),
    ],
)
def test_what_leaks_on_purpose_is_found(leak: Callable[[int, dist.Store], object], named: str) -> None:
    assert any(text.startswith(f"{named} on rank") for text in _grown("plain DDP", leak))


def test_the_standard_error_is_that_of_least_squares() -> None:
    found = fitted([0, 1, 2, 3, 4], [1.0, 2.0, 4.0, 4.0, 6.0])  # Residuals that change sign are not widened.
    assert found.per_step == pytest.approx(1.2)
    assert found.error == pytest.approx((0.8 / 3 / 10) ** 0.5)


def test_noise_is_seldom_taken_for_growth_where_neighbours_are_alike() -> None:
    rng = random.Random(7)
    significant = 0
    for _ in range(400):
        values, value = [], 0.0
        for _ in range(160):
            value = 0.8 * value + rng.gauss(0, 1)
            values.append(value)
        significant += fitted(range(160), values).is_significant
    assert significant <= 8  # 0.1 % of normal noise; without the widening it is some 15 %.


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
