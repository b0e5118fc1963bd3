"""What PowerSGD computes: nothing is lost, and what is left out arrives later."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from overlap import (
    BFloat16,
    Cast,
    Float8,
    Float16,
    Int4,
    Int8,
    PowerSGD,
    Stage,
    TopK,
    Wire,
)

from .checks import EPS, check_step, gradients, memory, world_of
from .lockstep import World

WIRES = [Int8(), Int4(), Int8(chunk=8, rounding="stochastic"), Float8(), Float16(), BFloat16(), TopK(0.3, chunk=8)]
shape = st.lists(st.integers(1, 8), min_size=1, max_size=3).map(tuple)


@settings(max_examples=30, deadline=None, derandomize=True)
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
    start_step=st.integers(0, 2),
    wire=st.sampled_from([None, None, *WIRES]),
    kind=st.sampled_from(["plain", "cast"]),
    names=st.booleans(),
    left_group=st.integers(0, 2),
)
@example(
    shapes=[(8, 8)], ranks=2, rank=1, rate=0.0, dtype=torch.float32, seed=0, scale=1.0, warm_start=True,
    alternate=False, start_step=0, wire=None, kind="plain", names=True, left_group=0,
)  # fmt: skip
def test_nothing_is_lost_with_any_options(
    shapes: list[tuple[int, ...]],
    ranks: int,
    rank: int,
    rate: float,
    dtype: torch.dtype,
    seed: int,
    scale: float,
    warm_start: bool,
    alternate: bool,
    start_step: int,
    wire: Wire | None,
    kind: str,
    names: bool,
    left_group: int,
) -> None:
    alternate = alternate and warm_start

    def make() -> Stage:
        stage = PowerSGD(
            rank=rank,
            start_step=start_step,
            min_compression_rate=rate,
            warm_start=warm_start,
            alternate=alternate,
            wire=wire,
        )
        return Cast(torch.float16, stage) if kind == "cast" else stage

    world = World([make() for _ in range(ranks)], shapes, names=names, divisor=max(1, ranks - left_group))
    # Values travel through a wire in fp32 at best.
    used = [
        torch.float64 if wire is None else torch.float32,
        dtype,
        torch.float16 if kind == "cast" else dtype,
    ]
    tolerance = 64 * max(EPS[one] for one in used)
    for step in range(5):
        check_step(world, gradients(seed + step, ranks, shapes, dtype, scale), tolerance)
    assert all(memory(stage).counts["steps"] == 5 for stage in world.stages)


@settings(max_examples=12, deadline=None, derandomize=True)
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
    # An alternating step has the basis of the step before, random at first; what it leaves out would come later.
    options = {"alternate": True, "error_feedback": False} if alternate else {}
    world = world_of(ranks, [(rows, cols)], rank=rank, **options)
    generator = torch.Generator().manual_seed(seed)

    def orthonormal(rows: int, cols: int) -> Tensor:
        # Well conditioned, so that any loss is the algorithm's own.
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


def test_before_start_step_the_mean_is_exact() -> None:
    world = World([PowerSGD(rank=1, start_step=3) for _ in range(2)], [(30, 30)])
    for step in range(5):
        local = gradients(step, 2, [(30, 30)], torch.float32)
        output = world.step(local)[0][0]
        exact = torch.equal(output, local[0][0] * 0.5 + local[1][0] * 0.5)
        assert exact == (step < 3)
        assert len(world.sent_numel) == (1 if step < 3 else 2)
