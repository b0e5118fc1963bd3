"""On accelerators: the host reads no value, and factors of all lengths are orthonormalized at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap import Int8, PowerSGD
from overlap._torch.device import streams_replaced

from ..one_stream import OneStream
from .checks import gradients, world_of
from .lockstep import World

SHAPES = [(40, 30), (40, 30), (7,), (9, 4, 3), (64, 5)]
OPTIONS: list[dict[str, Any]] = [{"rank": 3, "error_dtype": torch.bfloat16}, {"alternate": True, "wire": Int8()}]


def _empty_directions(rank: int, length: int, *, dtype: torch.dtype, device: torch.device, **_: Any) -> torch.Tensor:
    return torch.empty(rank, length, dtype=dtype, device=device)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_no_step_reads_a_value_on_the_host(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    # Tensors without values show it. There is no generator of a device without values.
    monkeypatch.setattr("overlap.hooks.powersgd.algorithm.random_directions", _empty_directions)
    device = torch.device("meta")
    with pytest.raises(RuntimeError, match="meta"):
        bool(torch.ones(1, device=device).isfinite().all())
    world = World([PowerSGD(min_compression_rate=0, **options) for _ in range(2)], SHAPES, device=device)
    for _ in range(2):
        local = [[torch.empty(shape, dtype=torch.float16, device=device) for shape in SHAPES] for _ in range(2)]
        for output, shape in zip(world.step(local)[0], SHAPES, strict=True):
            assert output.shape == shape and output.dtype == torch.float16 and output.device == device


@pytest.mark.parametrize("options", [{}, {"alternate": True}, {"error_feedback": False}], ids=str)
def test_results_are_those_of_a_cpu(options: dict[str, Any]) -> None:
    results = []
    for has_streams in (False, True):
        with streams_replaced(OneStream(has_streams=has_streams)):
            world = world_of(2, SHAPES, rank=3, **options)
            for step in range(5):
                local = gradients(step, 2, SHAPES, torch.float32)
                if step == 3:
                    local[1][3][0] = torch.nan
                outputs = world.step(local)[0]
                results.append([*outputs, *world.stages[0].state_dict()["residuals"].values()])
    for on_cpu, on_device in zip(results[:5], results[5:], strict=True):
        # In an alternating step a matrix that was not finite goes on from other directions.
        torch.testing.assert_close(on_device, on_cpu, rtol=1e-3, atol=1e-4, equal_nan=True)
