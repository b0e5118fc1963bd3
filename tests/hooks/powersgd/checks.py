"""What every step of a lockstep world must satisfy."""

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


def _by_rank(world: World) -> list[list[Tensor]]:
    """The residuals of each rank's stage; zero where it has none."""
    keys = world.names or map(str, range(len(world.shapes)))
    kept = dict(zip(keys, world.shapes, strict=True))
    return [
        [
            memory(stage).values().get(key, torch.zeros(shape)).to("cpu", torch.float64, copy=True)
            for key, shape in kept.items()
        ]
        for stage in world.stages
    ]


def residuals(world: World) -> list[Tensor]:
    """Of each parameter, the sum of the residuals over ranks."""
    return [sum(own) for own in zip(*_by_rank(world), strict=True)]  # type: ignore[misc]


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
    before = _by_rank(world)
    outputs = world.step(local)
    after = residuals(world)
    for place, given in enumerate(zip(*local, strict=True)):
        kept = [own[place] for own in before]
        given_in = sum(one.cpu().double() for one in (*given, *kept))
        given_out = outputs[0][place].cpu().double() * world.divisor + after[place]
        # Of each rank by itself: residuals may cancel in their sum, but their rounding errors do not.
        size = sum(float(one.abs().max()) for one in (*given, *kept))
        torch.testing.assert_close(given_out, given_in, rtol=0, atol=tolerance * max(size, 1e-30))
        for other in outputs[1:]:
            assert torch.equal(other[place], outputs[0][place]), "outputs differ among ranks"
    return outputs[0]
