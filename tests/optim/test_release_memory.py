"""Released gradients take no memory: the peak of the resident set, as the kernel counts it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from release_cases import SGD, is_released, registered, settle
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measuring import MemoryMeter
from harness import run_ranks

WIDTH, LAYERS = 512, 32
_MODEL_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4


def _peak(form: str, width: int, **options: Any) -> int:
    torch.manual_seed(0)
    meter = MemoryMeter(torch.device("cpu"))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1)
    optimizer = registered(form, ddp, SGD, **options)
    for layer in model:  # Computing takes longer than reducing, as in models of use.
        layer.bias.register_hook(_sleeps)
    whole, inputs = 0, torch.randn(4, width)
    for step in range(4):
        if step == 2:  # The first pass has one bucket, and the second is the first that has others.
            Path("/proc/self/clear_refs").write_text("5")  # The recorded peak is what is resident now.
        ddp(inputs).square().mean().backward()
        optimizer.step()
        settle(optimizer)
    whole = meter.peak_bytes()
    if options:
        assert is_released(ddp)
    return whole


def _sleeps(gradient: torch.Tensor) -> None:
    time.sleep(0.02)


def _saved(rank: int, world_size: int, form: str) -> int:
    for options in ({}, {"release_gradients": True}):
        _peak(form, 16, **options)  # What is imported at first use counts for nobody.
    torch.set_num_threads(1)
    return _peak(form, WIDTH) - _peak(form, WIDTH, release_gradients=True)


@pytest.mark.parametrize("form", ["interleaved", "zero"])
def test_gradients_do_not_add_to_the_peak(form: str) -> None:
    for saved in run_ranks(_saved, 2, form):
        # Of the gradients all but a few buckets, of which the model has 32.
        assert saved > _MODEL_BYTES * 0.4, f"{saved / 2**20:.0f} of {_MODEL_BYTES / 2**20:.0f} MiB"
