"""Gradients that are zero, not finite, large or oddly laid out, and ranks that have joined."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap import Cast, PowerSGD

from .checks import EPS, check_step, gradients, residuals, world_of
from .lockstep import World

ZERO_SHAPES = [(6, 8), (6, 8), (8,)]
ZEROS = [[torch.zeros(shape) for shape in ZERO_SHAPES]] * 2


@pytest.mark.parametrize("options", [{"rank": 1}, {"rank": 6, "alternate": True}, {"warm_start": False}], ids=str)
def test_a_zero_gradient_gives_zero_and_loses_nothing(options: dict[str, Any]) -> None:
    world = world_of(2, ZERO_SHAPES, **options)
    for _ in range(3):
        assert all(bool((output == 0).all()) for output in world.step(ZEROS)[0])
    for step in range(6):
        check_step(world, gradients(step, 2, ZERO_SHAPES, torch.float32), 1e-5)
    for _ in range(40):
        check_step(world, ZEROS, 1e-5)
    assert all(float(residual.abs().max()) < 1e-3 for residual in residuals(world)), "it has arrived"


STRUCK_SHAPES = [(6, 8), (6, 8), (10, 4), (8,)]


@pytest.mark.parametrize(("value", "dtype"), [(float("inf"), torch.float32), (float("nan"), torch.float16)])
@pytest.mark.parametrize("options", [{}, {"alternate": True}, {"error_feedback": False}], ids=str)
def test_an_element_that_is_not_finite_makes_its_matrix_nan_on_every_rank_and_changes_no_memory(
    value: float, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    worlds = [world_of(2, STRUCK_SHAPES, rank=2, **options) for _ in range(2)]
    for world in worlds:
        for step in range(3):
            world.step(gradients(step, 2, STRUCK_SHAPES, dtype))
    world = worlds[0]
    before = copy.deepcopy([stage.state_dict() for stage in world.stages])
    local = gradients(3, 2, STRUCK_SHAPES, dtype)
    expected = worlds[1].step(copy.deepcopy(local))
    local[1][0][2, 3] = value
    for outputs, wanted in zip(world.step(local), expected, strict=True):
        assert bool(outputs[0].isnan().all()), "the whole matrix, on every rank"
        torch.testing.assert_close(outputs[1:], wanted[1:])
    for stage, old in zip(world.stages, before, strict=True):
        new = stage.state_dict()
        for tensor in (*new["residuals"].values(), *new["factors"].values()):
            assert bool(tensor.isfinite().all())
        if not options.get("alternate"):
            assert torch.equal(new["factors"]["p0"], old["factors"]["p0"])
        if "p0" in old["residuals"]:
            assert torch.equal(new["residuals"]["p0"], old["residuals"]["p0"])
    for step in range(4, 7):
        local = gradients(step, 2, STRUCK_SHAPES, dtype)
        if options.get("error_feedback", True):
            check_step(world, local, 64 * EPS[dtype])
        else:
            assert all(bool(output.isfinite().all()) for output in world.step(local)[0])


@pytest.mark.parametrize("alternate", [False, True])
def test_nothing_is_lost_in_other_memory_formats(alternate: bool) -> None:
    shapes = [(8, 4, 3, 3), (12, 8), (12, 8)]
    world = world_of(2, shapes, rank=4, alternate=alternate)
    for step in range(4):
        check_step(
            world, [[_strided(tensor) for tensor in one] for one in gradients(step, 2, shapes, torch.float32)], 1e-5
        )


def _strided(tensor: Tensor) -> Tensor:
    if tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.t().contiguous().t()


LARGE_SHAPES = [(60, 9000), (9000, 60), (5,)]


@pytest.mark.parametrize("options", [{}, {"alternate": True}], ids=str)
@pytest.mark.parametrize("is_wire", [False, True], ids=["fp16 model", "fp16 wire"])
def test_large_finite_gradients_do_not_overflow_in_float16(options: dict[str, Any], is_wire: bool) -> None:
    """The factors of a matrix of thousands are larger than float16 holds: 1000 x the root of 9000 is 94868."""
    stages = [PowerSGD(rank=2, min_compression_rate=0, **options) for _ in range(2)]
    world = World([Cast(torch.float16, stage) for stage in stages] if is_wire else stages, LARGE_SHAPES)
    dtype = torch.float32 if is_wire else torch.float16
    for _ in range(4):
        output = world.step([[torch.full(shape, 1000.0, dtype=dtype) for shape in LARGE_SHAPES]] * 2)[0]
        assert all(bool(one.isfinite().all()) for one in output)
        if not options:
            assert all(bool(((one.float() - 1000).abs() <= 5).all()) for one in output)
