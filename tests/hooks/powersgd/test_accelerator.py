"""On accelerators the host reads no value, which tensors without values show where there is no accelerator."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from overlap import Int8, PowerSGD

from .checks import check_step, gradients, residuals
from .lockstep import World

SHAPES = [(40, 30), (40, 30), (7,), (9, 4, 3), (64, 5)]
OPTIONS: list[dict[str, Any]] = [
    {"rank": 1},
    {"rank": 4},
    {"rank": 4, "epsilon": 1e-8},
    {"rank": 4, "alternate": True},
    {"rank": 2, "warm_start": False},
    {"rank": 2, "error_feedback": False},
    {"rank": 3, "error_dtype": torch.bfloat16},
]


def _empty_directions(rank: int, length: int, *, dtype: torch.dtype, device: torch.device, **_: Any) -> torch.Tensor:
    return torch.empty(rank, length, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("options", [*OPTIONS, {"wire": Int8()}], ids=str)
def test_no_step_reads_a_value_on_the_host(
    options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There is no generator of a device without values.
    monkeypatch.setattr("overlap.hooks.powersgd.algorithm.random_directions", _empty_directions)
    device = torch.device("meta")
    with pytest.raises(RuntimeError, match="meta"):
        bool(torch.ones(1, device=device).isfinite().all())
    stages = [PowerSGD(min_compression_rate=0, **options) for _ in range(2)]
    world = World(stages, SHAPES, device=device)
    for _ in range(4):
        local = [[torch.empty(shape, dtype=dtype, device=device) for shape in SHAPES] for _ in range(2)]
        for output, shape in zip(world.step(local)[0], SHAPES, strict=True):
            assert output.shape == shape and output.dtype == dtype and output.device == device


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_host_never_waits_for_a_gpu_and_outputs_are_right(options: dict[str, Any], dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    world = World([PowerSGD(min_compression_rate=0, **options) for _ in range(2)], SHAPES, device=device)
    for step in range(4):
        local = [[tensor.to(device) for tensor in one] for one in gradients(step, 2, SHAPES, dtype)]
        if step == 2:
            local[1][0][0, 0] = torch.inf
        if step == 1:  # The first step creates the handles of libraries.
            torch.cuda.set_sync_debug_mode("error")
        try:
            outputs = world.step(copy.deepcopy(local))[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert bool(outputs[0].isfinite().all()) == (step != 2)
        assert all(bool(output.isfinite().all()) for output in outputs[1:])
    assert all(bool(residual.isfinite().all()) for residual in residuals(world))
    if options.get("error_feedback", True):
        local = [[tensor.to(device) for tensor in one] for one in gradients(9, 2, SHAPES, dtype)]
        loose = dtype == torch.float16 or "error_dtype" in options
        check_step(world, local, 0.1 if loose else 1e-4)
