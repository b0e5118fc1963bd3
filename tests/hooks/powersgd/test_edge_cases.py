"""Gradients that are zero, not finite, large or oddly laid out, and ranks that have joined."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from overlap import Cast, PowerSGD
from overlap.hooks.powersgd.algorithm import PowerIteration

from .checks import EPS, check_step, gradients, memory, residual_size, residuals, world_of
from .lockstep import World

ZERO_SHAPES = [(6, 8), (6, 8), (8,)]
ZEROS = [[torch.zeros(shape) for shape in ZERO_SHAPES]] * 2


@pytest.fixture(params=[{}, {"alternate": True}, {"warm_start": False}], ids=str)
def world_of_zeros(rank: int, epsilon: float, request: pytest.FixtureRequest) -> World:
    return world_of(2, ZERO_SHAPES, rank=rank, epsilon=epsilon, **request.param)


@pytest.mark.parametrize("rank", [1, 2, 4, 6])
@pytest.mark.parametrize("epsilon", [0.0, 1e-8])
class TestZeroGradient:
    def test_it_gives_zero(self, world_of_zeros: World) -> None:
        for _ in range(3):
            for output in world_of_zeros.step(ZEROS)[0]:
                assert bool((output == 0).all())

    def test_after_it_the_invariant_holds(self, world_of_zeros: World) -> None:
        for _ in range(3):
            world_of_zeros.step(ZEROS)
        for step in range(6):
            check_step(world_of_zeros, gradients(step, 2, ZERO_SHAPES, torch.float32), 1e-5)

    def test_what_was_kept_before_it_still_arrives(self, world_of_zeros: World) -> None:
        for step in range(6):
            world_of_zeros.step(gradients(step, 2, ZERO_SHAPES, torch.float32))
        for _ in range(40):
            check_step(world_of_zeros, ZEROS, 1e-5)
        assert all(float(residual.abs().max()) < 1e-3 for residual in residuals(world_of_zeros))


STRUCK_SHAPES = [(6, 8), (6, 8), (10, 4), (8,)]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("options", [{}, {"alternate": True}, {"error_feedback": False}], ids=str)
class TestNonFiniteGradient:
    """After three steps, one element of one matrix on rank 1 is not finite."""

    def world(self, dtype: torch.dtype, options: dict[str, Any]) -> World:
        world = world_of(2, STRUCK_SHAPES, rank=2, **options)
        for step in range(3):
            world.step(gradients(step, 2, STRUCK_SHAPES, dtype))
        return world

    def strike(self, world: World, value: float, dtype: torch.dtype) -> list[list[Tensor]]:
        local = gradients(3, 2, STRUCK_SHAPES, dtype)
        local[1][0][2, 3] = value
        return world.step(local)

    def test_it_makes_its_matrix_nan_on_every_rank_and_no_other(
        self, value: float, dtype: torch.dtype, options: dict[str, Any]
    ) -> None:
        expected = self.world(dtype, options).step(gradients(3, 2, STRUCK_SHAPES, dtype))
        outputs = self.strike(self.world(dtype, options), value, dtype)
        for rank in range(2):
            assert bool(outputs[rank][0].isnan().all()), "the whole matrix, on every rank"
            for place in (1, 2, 3):
                torch.testing.assert_close(outputs[rank][place], expected[rank][place])

    def test_it_leaves_the_memory_as_it_was(self, value: float, dtype: torch.dtype, options: dict[str, Any]) -> None:
        world = self.world(dtype, options)
        before = copy.deepcopy([stage.state_dict() for stage in world.stages])
        self.strike(world, value, dtype)
        for stage, old in zip(world.stages, before, strict=True):
            new = stage.state_dict()
            for tensor in (*new["residuals"].values(), *new["factors"].values()):
                assert bool(tensor.isfinite().all())
            if not options.get("alternate"):
                assert torch.equal(new["factors"]["p0"], old["factors"]["p0"])
            if "p0" in old["residuals"]:
                assert torch.equal(new["residuals"]["p0"], old["residuals"]["p0"])

    def test_after_it_training_goes_on(self, value: float, dtype: torch.dtype, options: dict[str, Any]) -> None:
        world = self.world(dtype, options)
        self.strike(world, value, dtype)
        for step in range(4, 7):
            local = gradients(step, 2, STRUCK_SHAPES, dtype)
            if options.get("error_feedback", True):
                check_step(world, local, 64 * EPS[dtype])
            else:
                assert all(bool(output.isfinite().all()) for output in world.step(local)[0])


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


BLOCKED = [
    {},
    {"alternate": True},
    {"error_feedback": False},
    {"error_dtype": torch.bfloat16},
    {"error_dtype": torch.float16, "alternate": True},
]


@pytest.mark.parametrize("options", BLOCKED, ids=str)
def test_a_large_matrix_taken_in_blocks_is_the_same(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for matrices beyond the cache, with sizes of a test."""
    shapes = [(33, 8), (40, 5), (7, 9)]

    def outputs(block_numel: int) -> list[list[Tensor]]:
        monkeypatch.setattr("overlap.hooks.powersgd.layout._BLOCK_NUMEL", block_numel)
        world = world_of(2, shapes, rank=2, **options)
        found = []
        for step in range(5):
            local = gradients(step, 2, shapes, torch.float32)
            if step == 3:
                local[0][0][0, 0] = torch.nan
            found.append(world.step(local)[0])
        return found

    # A sum in another order can round a residual of half precision the other way.
    eps = torch.finfo(options.get("error_dtype", torch.float32)).eps
    torch.testing.assert_close(outputs(64), outputs(10**9), equal_nan=True, rtol=1e-4, atol=max(1e-5, 4 * eps))


@pytest.mark.parametrize("alternate", [False, True])
def test_memory_formats_change_nothing(alternate: bool) -> None:
    shapes = [(8, 4, 3, 3), (12, 8)]
    results = []
    for transform in (lambda tensor: tensor, _strided):
        world = world_of(2, shapes, rank=4, alternate=alternate)
        for step in range(4):
            local = gradients(step, 2, shapes, torch.float32)
            outputs = check_step(world, [[transform(tensor) for tensor in one] for one in local], 1e-5)
        results.append([*outputs, *residuals(world)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def _strided(tensor: Tensor) -> Tensor:
    if tensor.ndim == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor.t().contiguous().t()


JOINED_SHAPES = [(9, 7), (5,)]


def _one_rank_has_joined() -> World:
    """Three ranks after four steps; from the next one on, rank 2 takes part with zeros."""
    world = world_of(3, JOINED_SHAPES, rank=1)
    for step in range(4):
        check_step(world, gradients(step, 3, JOINED_SHAPES, torch.float32), 1e-5)
    return world


def _without_rank_2(step: int) -> list[list[Tensor]]:
    local = gradients(step, 3, JOINED_SHAPES, torch.float32)
    return [*local[:2], [torch.zeros(shape) for shape in JOINED_SHAPES]]


def test_the_invariant_holds_with_a_rank_that_has_joined() -> None:
    world = _one_rank_has_joined()
    for step in range(4, 40):
        check_step(world, _without_rank_2(step), 1e-5, replays=[2])


def test_a_rank_that_has_joined_only_gives_its_residual_away() -> None:
    world = _one_rank_has_joined()
    kept = memory(world.stages[2]).residuals["p0"]
    norms = [float(kept.norm())]
    for step in range(4, 40):
        world.step(_without_rank_2(step), replays=[2])
        norms.append(float(kept.norm()))
    assert all(after <= before * 1.0001 for before, after in itertools.pairwise(norms))
    assert norms[-1] < 0.2 * norms[0]


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


@pytest.mark.parametrize("options", [{}, {"alternate": True}], ids=str)
@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-4])
def test_scaling_for_float16_is_as_exact_for_ordinary_gradients(
    options: dict[str, Any], scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [(64, 48), (48, 64), (16, 300), (7,)]
    local = gradients(0, 2, shapes, torch.float16, scale)

    def outputs(dtype: torch.dtype) -> Tensor:
        world = world_of(2, shapes, rank=2, **options)
        return torch.cat(
            [one.flatten().float() for one in world.step([[g.to(dtype) for g in own] for own in local])[0]]
        )

    exact, scaled = outputs(torch.float32), outputs(torch.float16)
    monkeypatch.setattr(PowerIteration, "_scale_", lambda *args, **options: None)
    unscaled = outputs(torch.float16)
    smallest = 2.0**-24
    assert (scaled - exact).abs().mean() <= 1.02 * (unscaled - exact).abs().mean() + 4 * smallest
