"""On accelerators the host reads no value, which tensors without values show where there is no accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap import Int8, PowerSGD

from .lockstep import World

SHAPES = [(40, 30), (40, 30), (7,), (9, 4, 3), (64, 5)]
OPTIONS: list[dict[str, Any]] = [
    {"rank": 1},
    {"rank": 4, "alternate": True},
    {"rank": 2, "warm_start": False},
    {"rank": 2, "error_feedback": False},
    {"rank": 3, "error_dtype": torch.bfloat16},
    {"wire": Int8()},
]


def _empty_directions(rank: int, length: int, *, dtype: torch.dtype, device: torch.device, **_: Any) -> torch.Tensor:
    return torch.empty(rank, length, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
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
