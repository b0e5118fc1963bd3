"""The factors that a step starts from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from overlap.hooks.powersgd.plan import Family
from overlap.hooks.powersgd.streams import current_stream

__all__ = ["Directions", "normalize"]


class Directions:
    """Random directions, the same on every rank: they follow from the seed, the shape and the step alone.

    Those of a warm start do not depend on the step and are kept, one set a shape (on an accelerator also a stream,
    since streams do not wait for each other); the others are drawn at each step.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept: dict[tuple[object, ...], Tensor] = {}

    def draw(
        self, rank: int, length: int, *, dtype: torch.dtype, device: torch.device, step: int | None = None
    ) -> Tensor:
        """Rows of a random matrix, ``(rank, length)``."""
        key = (rank, length, dtype, device, current_stream(device))
        if step is None and key in self._kept:
            return self._kept[key]
        # Seeding a generator of its own leaves the user's alone, and on an accelerator it costs no
        # synchronization.
        generator = torch.Generator(device=device)
        generator.manual_seed(_mix(self._seed, rank, length, 0 if step is None else step + 1))
        drawn = torch.randn(rank, length, generator=generator, dtype=dtype, device=device)
        if step is None:
            self._kept[key] = drawn
        return drawn


def normalize(flat: Tensor, families: Sequence[Family], directions: Directions) -> Tensor:
    """Scale the directions of all families to length 1, in place; draw anew those that are rounding errors.

    Products with such directions stay in the range of the gradient, in half precision too. A direction
    vanishes when the gradient had a smaller rank than the factor; a random one will find what a later
    gradient has more.
    """
    tiny = 8 * torch.finfo(flat.dtype).eps
    for family in families:
        rows = family.of(flat)
        lengths = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        fresh = directions.draw(family.rank, family.length, dtype=flat.dtype, device=flat.device)
        is_there = lengths > tiny * lengths.amax(dim=1, keepdim=True)
        rows.copy_(torch.where(is_there, rows / lengths, fresh * family.length**-0.5))
    return flat


def _mix(*numbers: int) -> int:
    mixed = 0
    for number in numbers:
        mixed = (mixed * 6_364_136_223_846_793_005 + number + 1_442_695_040_888_963_407) % 2**63
    return mixed
