"""`batched_powerSGD_hook`: a bucket is one square matrix."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import overlap
from overlap import PowerSGDState
from overlap.hooks.powersgd.algorithm import Directions
from overlap.hooks.powersgd.layout import square_layout

from .lockstep import World


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(1, 8))
def test_a_bucket_fits_its_square(numel: int, rank: int) -> None:
    (batch,) = square_layout(numel, rank=rank).batches
    assert (batch.rows - 1) ** 2 < numel <= batch.rows**2
    assert batch.rank == min(rank, batch.rows)


def test_outputs_are_those_of_the_papers_algorithm_on_the_square() -> None:
    """PyTorch's own batched hook raises in 2.13, so the reference is the paper's algorithm."""
    shapes = [(5, 7), (9,), (4, 2, 3)]
    numel = sum(math.prod(shape) for shape in shapes)
    side = 9
    assert (side - 1) ** 2 < numel <= side**2
    states = [PowerSGDState(None, 2, 0) for _ in range(2)]
    world = World([overlap.batched_powerSGD_hook.stage(state) for state in states], shapes)
    right = Directions(0).draw(2, side, dtype=torch.float64, device=torch.device("cpu")).T
    residuals = torch.zeros(2, side * side, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        local = [[torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(2)]
        outputs = world.step(local)
        for own_rank in range(2):
            residuals[own_rank, :numel] += torch.cat([gradient.flatten() for gradient in local[own_rank]])
        matrices = residuals.view(2, side, side)
        left = torch.linalg.qr(matrices.mean(0) @ right)[0]
        right = matrices.mean(0).T @ left
        output = (left @ right.T).flatten()
        residuals = residuals - output  # Of the mean, as PyTorch keeps it: another split of the same sum.
        found = torch.cat([gradient.flatten() for gradient in outputs[0]])
        torch.testing.assert_close(found, output[:numel], rtol=1e-9, atol=1e-9)
        residuals[:, numel:] = 0
    assert states[0].iter == 6 and states[0].compression_stats()[1:] == (6 * numel, 6 * 2 * 2 * side)
