"""What goes in comes out, now or later; and nothing that is not finite stays."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overlap import Cast, PowerSGD, PowerSGDState, Stage, batched_powerSGD_hook

from .lockstep import World

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EPS = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}


def world_of(ranks: int, shapes: Sequence[tuple[int, ...]], **options: Any) -> World:
    """Every matrix is compressed."""
    return World([PowerSGD(min_compression_rate=0, **options) for _ in range(ranks)], shapes)


def residuals(world: World) -> list[Tensor]:
    """The sum over ranks of what is kept of each parameter."""
    totals = [torch.zeros(shape, dtype=torch.float64) for shape in world.shapes]
    for stage in world.stages:
        for place, key in enumerate(world.names or map(str, range(len(world.shapes)))):
            slot = memory(stage).slots.get(key)
            if slot is not None and slot.residual is not None:
                totals[place] += slot.residual
    return totals


def residual_size(stage: Stage, world: World, place: int) -> float:
    slot = memory(stage).slots.get(world.names[place] if world.names else str(place))
    return 0.0 if slot is None or slot.residual is None else float(slot.residual.abs().max())


def memory(stage: Stage) -> Any:
    while isinstance(stage, Cast):
        stage = stage.inner
    return stage._memory  # type: ignore[attr-defined]


def gradients(
    seed: int, ranks: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, scale: float = 1.0
) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def one(shape: tuple[int, ...]) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(dtype)

    return [[one(shape) for shape in shapes] for _ in range(ranks)]


def check_step(world: World, local: list[list[Tensor]], tolerance: float, **options: Any) -> list[Tensor]:
    """One step, which keeps the invariant: what came in and was kept is what comes out and is kept."""
    before = residuals(world)
    # Of each rank: what they keep may cancel in the sum, and rounding does not.
    places = range(len(world.shapes))
    kept = [[residual_size(stage, world, place) for place in places] for stage in world.stages]
    outputs = world.step(local, **options)
    after = residuals(world)
    for place in places:
        total = sum(local[rank][place].double() for rank in range(len(local)))
        given_in = total + before[place]
        given_out = outputs[0][place].double() * world.divisor + after[place]
        size = sum(float(local[rank][place].abs().max()) + kept[rank][place] for rank in range(len(local)))
        torch.testing.assert_close(given_out, given_in, rtol=0, atol=tolerance * max(size, 1e-30))
        for other in outputs[1:]:
            assert torch.equal(other[place], outputs[0][place]), "outputs differ among ranks"
    return outputs[0]


shape = st.lists(st.integers(1, 8), min_size=1, max_size=3).map(tuple)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    shapes=st.lists(shape, min_size=1, max_size=5),
    ranks=st.integers(1, 4),
    rank=st.integers(1, 6),
    rate=st.sampled_from([0.0, 1.0, 2.0]),
    dtype=st.sampled_from(list(EPS)),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([1e-3, 1.0, 1e2]),
    warm_start=st.booleans(),
    alternate=st.booleans(),
    error_dtype=st.sampled_from([None, torch.bfloat16, torch.float32]),
    start_step=st.integers(0, 2),
    epsilon=st.sampled_from([0.0, 1e-6]),
    kind=st.sampled_from(["plain", "cast", "square"]),
    names=st.booleans(),
    left_group=st.integers(0, 2),
)
def test_what_comes_in_comes_out_now_or_later(
    shapes: list[tuple[int, ...]],
    ranks: int,
    rank: int,
    rate: float,
    dtype: torch.dtype,
    seed: int,
    scale: float,
    warm_start: bool,
    alternate: bool,
    error_dtype: torch.dtype | None,
    start_step: int,
    epsilon: float,
    kind: str,
    names: bool,
    left_group: int,
) -> None:
    alternate = alternate and warm_start

    def make() -> Stage:
        if kind == "square":
            state = PowerSGDState(
                None,
                rank,
                start_step,
                warm_start=warm_start,
                orthogonalization_epsilon=epsilon,
                alternate=alternate,
                error_dtype=error_dtype,
            )
            return batched_powerSGD_hook.stage(state)
        stage = PowerSGD(
            rank=rank,
            start_step=start_step,
            min_compression_rate=rate,
            warm_start=warm_start,
            alternate=alternate,
            error_dtype=error_dtype,
            epsilon=epsilon,
        )
        return Cast(torch.float16, stage) if kind == "cast" else stage

    world = World([make() for _ in range(ranks)], shapes, names=names, divisor=max(1, ranks - left_group))
    used = [dtype, error_dtype or dtype, torch.float16 if kind == "cast" else dtype]
    tolerance = 64 * max(EPS[one] for one in used)
    for step in range(5):
        check_step(world, gradients(seed + step, ranks, shapes, dtype, scale), tolerance)
    assert all(memory(stage).steps == 5 for stage in world.stages)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 12),
    cols=st.integers(1, 12),
    true_rank=st.integers(0, 4),
    extra=st.integers(0, 3),
    ranks=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    alternate=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_rank_that_suffices_gives_the_mean(
    rows: int,
    cols: int,
    true_rank: int,
    extra: int,
    ranks: int,
    dtype: torch.dtype,
    alternate: bool,
    seed: int,
) -> None:
    true_rank = min(true_rank, rows, cols)
    rank = max(1, true_rank + extra)
    # An alternating step has the basis of the step before, random at first; what it leaves out would come
    # later.
    options = {"alternate": True, "error_feedback": False} if alternate else {}
    world = world_of(ranks, [(rows, cols)], rank=rank, **options)
    generator = torch.Generator().manual_seed(seed)

    def orthonormal(rows: int, cols: int) -> Tensor:
        # Well conditioned, so that what is lost is the algorithm's doing.
        return torch.linalg.qr(torch.randn(rows, cols, generator=generator, dtype=dtype))[0]

    base, other = orthonormal(rows, true_rank), orthonormal(cols, true_rank).T
    for step in range(4):
        # Row and column space are the same on every rank, so the mean has no higher rank than each.
        mixed = base @ orthonormal(true_rank, true_rank) @ other
        local = [[(own_rank + 1) * mixed] for own_rank in range(ranks)]
        output = world.step(local)[0][0]
        if alternate and step == 0:
            continue
        mean = sum(one[0] for one in local) / ranks
        size = float(sum(one[0].abs().max() for one in local)) if mean.numel() else 0.0
        torch.testing.assert_close(output, mean, rtol=0, atol=1000 * EPS[dtype] * max(size, 1e-30))


def test_a_matrix_of_full_rank_comes_out_whole_step_by_step() -> None:
    """Error feedback gives away all of a constant gradient: the mean of outputs tends to it."""
    for options in ({}, {"alternate": True}, {"error_dtype": torch.bfloat16}):
        world = world_of(2, [(8, 6)], rank=1, **options)
        local = gradients(3, 2, [(8, 6)], torch.float32)
        mean = (local[0][0] + local[1][0]) / 2
        total = torch.zeros_like(mean)
        for _ in range(60):
            total += world.step(local)[0][0]
        assert float((total / 60 - mean).norm() / mean.norm()) < 0.1, options

    world = world_of(2, [(8, 6)], rank=1, error_feedback=False)
    total = sum(world.step(local)[0][0] for _ in range(60))
    assert float((total / 60 - mean).norm() / mean.norm()) > 0.3, "the rest never arrives"


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
            assert all(
                bool(output.isfinite().all()) for output in struck.step(gradients(step, 2, shapes, dtype))[0]
            )


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
        monkeypatch.setattr("overlap.hooks.powersgd.operands._BLOCK_NUMEL", block_numel)
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


def test_before_the_start_and_for_other_dtypes_the_mean_is_exact() -> None:
    world = World([PowerSGD(rank=1, start_step=3) for _ in range(2)], [(30, 30)])
    for step in range(5):
        local = gradients(step, 2, [(30, 30)], torch.float32)
        output = world.step(local)[0][0]
        exact = torch.equal(output, local[0][0] * 0.5 + local[1][0] * 0.5)
        assert exact == (step < 3)
        assert len(world.sent_numel) == (1 if step < 3 else 2)
    local = [[torch.randn(30, 30, dtype=torch.complex64)] for _ in range(1)]
    stage = PowerSGD(rank=1)
    assert torch.equal(World([stage], [(30, 30)]).step(local)[0][0], local[0][0])


def test_a_bucket_whose_cut_changes_keeps_its_memory_by_parameter() -> None:
    """As DDP's does after the first iteration: the order of parameters is no part of what is computed."""
    shapes = [(8, 6), (8, 6), (12, 5), (4,)]
    order = [2, 0, 3, 1]
    worlds = [world_of(2, shapes, rank=2) for _ in range(2)]
    fixed, changing = worlds
    for step in range(6):
        local = gradients(step, 2, shapes, torch.float64)
        expected = fixed.step(local)[0]
        if step == 2:
            changing.parameters = [changing.parameters[place] for place in order]
            changing.names = tuple(changing.names[place] for place in order)
        if step >= 2:
            found = changing.step([[one[place] for place in order] for one in local])[0]
            expected = [expected[place] for place in order]
        else:
            found = changing.step(local)[0]
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_rounding_to_the_wires_precision_stays_in_the_residual() -> None:
    """Through fp16, the residual is of the factors as they were sent, not as they were computed."""
    stage = PowerSGD(rank=1, min_compression_rate=0, error_dtype=torch.float32)
    world = World([Cast(torch.float16, stage)], [(5, 4)])
    local = [[torch.full((5, 4), 1000.1)]]
    check_step(world, local, 2e-3)
