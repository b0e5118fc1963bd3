"""What every step of a lockstep world must satisfy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from overlap import Cast, PowerSGD, Stage

from .lockstep import World

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
EPS = {dtype: torch.finfo(dtype).eps for dtype in DTYPES}


def world_of(ranks: int, shapes: Sequence[tuple[int, ...]], **options: Any) -> World:
    """A world of PowerSGD stages that compress every matrix."""
    return World([PowerSGD(min_compression_rate=0, **options) for _ in range(ranks)], shapes)


def residuals(world: World) -> list[Tensor]:
    """Of each parameter, the sum of the residuals over ranks."""
    totals = [torch.zeros(shape, dtype=torch.float64) for shape in world.shapes]
    for stage in world.stages:
        for place, key in enumerate(world.names or map(str, range(len(world.shapes)))):
            if key in memory(stage).errors:
                totals[place] += memory(stage).errors[key].cpu()
    return totals


def residual_size(stage: Stage, world: World, place: int) -> float:
    residual = memory(stage).errors.get(world.names[place] if world.names else str(place))
    return 0.0 if residual is None else float(residual.abs().max())


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


def check_step(world: World, local: list[list[Tensor]], tolerance: float) -> list[Tensor]:
    """One step that keeps the invariant: gradients and residuals before equal outputs and residuals after."""
    before = residuals(world)
    # Of each rank by itself: residuals may cancel in their sum, but their rounding errors do not.
    places = range(len(world.shapes))
    kept = [[residual_size(stage, world, place) for place in places] for stage in world.stages]
    outputs = world.step(local)
    after = residuals(world)
    for place in places:
        total = sum(local[rank][place].cpu().double() for rank in range(len(local)))
        given_in = total + before[place]
        given_out = outputs[0][place].cpu().double() * world.divisor + after[place]
        size = sum(float(local[rank][place].abs().max()) + kept[rank][place] for rank in range(len(local)))
        torch.testing.assert_close(given_out, given_in, rtol=0, atol=tolerance * max(size, 1e-30))
        for other in outputs[1:]:
            assert torch.equal(other[place], outputs[0][place]), "outputs differ among ranks"
    return outputs[0]
