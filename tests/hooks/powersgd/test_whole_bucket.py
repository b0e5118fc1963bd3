"""`batched_powerSGD_hook`: a bucket is one square matrix."""

import math

import pytest
import torch

import overlap
from overlap import PowerSGDState
from overlap.hooks.powersgd.algorithm import random_directions

from .checks import check_step, gradients
from .lockstep import World


@pytest.mark.parametrize("numel", [1, 2, 5, 16, 500])
def test_a_bucket_is_sent_as_the_factors_of_the_smallest_square_that_holds_it(numel: int) -> None:
    world = World([overlap.batched_powerSGD_hook.stage(PowerSGDState(None, 2, 0))], [(numel,)])
    gradient = torch.randn(numel)
    (output,) = world.step([[gradient]])[0]
    side = math.ceil(math.sqrt(numel))
    assert world.sent_numel == [min(2, side) * side] * 2
    if side <= 2:
        torch.testing.assert_close(output, gradient)


def test_residuals_of_parameters_go_with_them_into_other_buckets() -> None:
    """Factors start anew where a bucket is cut in another way; nothing is lost."""
    shapes = [(5, 7), (9,), (4, 2, 3)]
    state = PowerSGDState(None, 1, 0)
    world = World([overlap.batched_powerSGD_hook.stage(state)], shapes)
    for step in range(3):
        check_step(world, gradients(step, 1, shapes, torch.float32), 1e-5)
    order = [2, 0]
    world.parameters = [world.parameters[place] for place in order]
    world.names = tuple(f"p{place}" for place in order)
    world.shapes = [world.shapes[place] for place in order]
    assert set(state.error_dict) == {"p0", "p1", "p2"}
    for step in range(3):
        check_step(world, gradients(step, 1, [shapes[place] for place in order], torch.float32), 1e-5)
    assert set(state.error_dict) == {"p0", "p1", "p2"}


def test_outputs_are_those_of_the_papers_algorithm_on_the_square() -> None:
    """PyTorch's own batched hook raises in 2.13, so the reference is the paper's algorithm."""
    shapes = [(5, 7), (9,), (4, 2, 3)]
    numel = sum(math.prod(shape) for shape in shapes)
    side = 9
    assert (side - 1) ** 2 < numel <= side**2
    states = [PowerSGDState(None, 2, 0) for _ in range(2)]
    world = World([overlap.batched_powerSGD_hook.stage(state) for state in states], shapes)
    right = random_directions(2, side, seed=0, step=None, dtype=torch.float64, device=torch.device("cpu")).T
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
