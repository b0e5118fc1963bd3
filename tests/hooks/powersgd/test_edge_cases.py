"""Gradients that are zero, not finite, large or oddly laid out, and ranks that have joined."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap import PowerSGD

from .checks import EPS, check_step, gradients, memory, residual_size, residuals, world_of
from .lockstep import World


@pytest.mark.parametrize("rank", [1, 2, 4, 6])
@pytest.mark.parametrize("epsilon", [0.0, 1e-8])
@pytest.mark.parametrize("options", [{}, {"alternate": True}, {"warm_start": False}], ids=str)
def test_a_zero_gradient_gives_zero_and_what_follows_is_right(
    rank: int, epsilon: float, options: dict[str, Any]
) -> None:
    shapes = [(6, 8), (6, 8), (8,)]
    stages = [PowerSGD(rank=rank, min_compression_rate=0, epsilon=epsilon, **options) for _ in range(2)]
    world = World(stages, shapes)
    for _ in range(3):
        for output in world.step([[torch.zeros(shape) for shape in shapes]] * 2)[0]:
            assert bool((output == 0).all())
    for step in range(6):
        check_step(world, gradients(step, 2, shapes, torch.float32), 1e-5)
    # And zero after something: what is kept still arrives.
    for _ in range(40):
        check_step(world, [[torch.zeros(shape) for shape in shapes]] * 2, 1e-5)
    assert all(float(residual.abs().max()) < 1e-3 for residual in residuals(world))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("options", [{}, {"alternate": True}, {"error_feedback": False}], ids=str)
def test_what_is_not_finite_passes_through_and_leaves_no_trace(
    value: float, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    shapes = [(6, 8), (6, 8), (10, 4), (8,)]
    worlds = [world_of(2, shapes, rank=2, **options) for _ in range(2)]
    for step in range(3):
        for world in worlds:
            world.step(gradients(step, 2, shapes, dtype))
    sound, struck = worlds
    before = copy.deepcopy([stage.state_dict() for stage in struck.stages])
    local = gradients(3, 2, shapes, dtype)
    expected = sound.step(local)
    local[1][0][2, 3] = value
    outputs = struck.step(local)
    for rank in range(2):
        assert bool(outputs[rank][0].isnan().all()), "the whole matrix, on every rank"
        for place in (1, 2, 3):
            torch.testing.assert_close(outputs[rank][place], expected[rank][place])
    for stage, old in zip(struck.stages, before, strict=True):
        new = stage.state_dict()
        for tensor in (*new["residuals"].values(), *new["factors"].values()):
            assert bool(tensor.isfinite().all())
        if not options.get("alternate"):
            assert torch.equal(new["factors"]["p0"], old["factors"]["p0"])
        if "p0" in old["residuals"]:
            assert torch.equal(new["residuals"]["p0"], old["residuals"]["p0"])
    for step in range(4, 7):
        if options.get("error_feedback", True):
            check_step(struck, gradients(step, 2, shapes, dtype), 64 * EPS[dtype])
        else:
            assert all(bool(output.isfinite().all()) for output in struck.step(gradients(step, 2, shapes, dtype))[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_more_than_half_precision_holds_does_not_stay_infinite(dtype: torch.dtype) -> None:
    """Gradients that cancel in the mean are left out whole, and add up on each rank."""
    large = torch.full((8, 6), 100.0)
    large[3, 3] = 60000.0
    world = world_of(2, [(8, 6)], rank=1, error_dtype=torch.float16)
    for _ in range(3):
        world.step([[large.to(dtype)], [-large.to(dtype)]])
        assert all(residual_size(stage, world, 0) <= torch.finfo(torch.float16).max for stage in world.stages)
    assert bool(world.step(gradients(0, 2, [(8, 6)], dtype))[0][0].isfinite().all())


def test_an_exact_gradient_that_is_not_finite_passes_through() -> None:
    world = world_of(2, [(4, 4), (3,)], rank=1)
    local = gradients(0, 2, [(4, 4), (3,)], torch.float32)
    local[0][1][1] = float("inf")
    matrix, vector = world.step(local)[1]
    assert vector[1] == float("inf") and bool(matrix.isfinite().all())


def test_a_large_matrix_taken_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for matrices beyond the cache, with sizes of a test."""
    shapes = [(33, 8), (40, 5), (7, 9)]
    outputs = []
    for block_numel in (64, 10**9):
        monkeypatch.setattr("overlap.hooks.powersgd.matrices._BLOCK_NUMEL", block_numel)
        for options in ({}, {"alternate": True}, {"error_feedback": False}):
            world = world_of(2, shapes, rank=2, **options)
            for step in range(5):
                local = gradients(step, 2, shapes, torch.float32)
                if step == 3:
                    local[0][0][0, 0] = torch.nan
                outputs.append(world.step(local)[0])
    half = len(outputs) // 2
    for ours, reference in zip(outputs[:half], outputs[half:], strict=True):
        torch.testing.assert_close(ours, reference, equal_nan=True, rtol=1e-4, atol=1e-5)


def test_memory_formats_change_nothing() -> None:
    shapes = [(8, 4, 3, 3), (12, 8)]
    results = []
    for transform in (lambda tensor: tensor, _strided):
        world = world_of(2, shapes, rank=4)
        for step in range(4):
            local = gradients(step, 2, shapes, torch.float32)
            check_step(world, [[transform(tensor) for tensor in one] for one in local], 1e-5)
        results.append(residuals(world))
    # The order of columns differs, and with it the random start; the kept mass is alike all the same.
    for one, other in zip(*results, strict=True):
        assert float(one.norm()) == pytest.approx(float(other.norm()), rel=0.5)


def _strided(tensor: Tensor) -> Tensor:
    if tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.t().contiguous().t()


def test_a_rank_that_has_joined_gives_away_its_residual_and_keeps_the_invariant() -> None:
    shapes = [(9, 7), (5,)]
    world = world_of(3, shapes, rank=1)
    for step in range(4):
        check_step(world, gradients(step, 3, shapes, torch.float32), 1e-5)
    kept = memory(world.stages[2]).slots["p0"]
    norms = [float(kept.residual.norm())]
    for step in range(4, 40):
        local = gradients(step, 3, shapes, torch.float32)
        local[2] = [torch.zeros(shape) for shape in shapes]
        check_step(world, local, 1e-5, replays=[2])
        norms.append(float(kept.residual.norm()))
    assert all(after <= before * 1.0001 for before, after in itertools.pairwise(norms))
    assert norms[-1] < 0.2 * norms[0]
