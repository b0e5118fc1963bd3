"""The factors that a pass starts from: those of the pass before (warm start), or random directions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from overlap._torch.device import has_streams, hold
from overlap.hooks.powersgd.layout import FactorBatch
from overlap.hooks.powersgd.matrices import Matrices

__all__ = ["Bases", "Directions"]


class Directions:
    """Random directions, the same on every rank: they follow from the seed, the shape and the step alone.

    Those of a warm start do not depend on the step and are kept, one set per shape; the others are drawn at each step.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept: dict[tuple[object, ...], Tensor] = {}

    def forget(self) -> None:
        """Drop what is kept; the next draw gives the same again."""
        self._kept.clear()

    def draw(
        self, rank: int, length: int, *, dtype: torch.dtype, device: torch.device, step: int | None = None
    ) -> Tensor:
        """Rows of a random matrix, ``(rank, length)``."""
        key = (rank, length, dtype, device)
        if step is None and key in self._kept:
            return hold(self._kept[key])
        # Seeding a generator of its own leaves the user's alone, and on an accelerator it costs no synchronization.
        generator = torch.Generator(device=device)
        generator.manual_seed(_mix(self._seed, rank, length, 0 if step is None else step + 1))
        drawn = torch.randn(rank, length, generator=generator, dtype=dtype, device=device)
        if step is None:
            self._kept[key] = drawn
        return drawn


class Bases:
    """Starts a pass from the factors that the pass before kept in its matrices' slots.

    Without ``warm_start`` none are kept, and each pass starts from new random directions.
    """

    def __init__(self, *, seed: int, warm_start: bool) -> None:
        self.directions = Directions(seed)
        self._warm_start = warm_start

    def start(self, matrices: Sequence[Matrices], *, is_left: bool, step: int, out: Tensor) -> None:
        """Fill ``out``, the tensor of all left or all right factors.

        After a change of rank the first directions, which are the leading ones, stay, and random ones come behind them.

        Raises:
            ConfigurationError: a factor that was loaded has directions of another length.
        """
        for each in matrices:
            batch = each.batch
            length = batch.rows if is_left else batch.cols
            fresh = None
            for factor, slot in zip(batch.factors(out, is_left=is_left), each.factor_slots, strict=True):
                old = slot.factor if slot.is_left == is_left and self._warm_start else None
                kept = 0
                if old is not None:
                    slot.check_factor(old, length)
                    kept = min(len(old), batch.rank)
                    factor[:kept].copy_(hold(old)[:kept])
                    if kept == batch.rank:
                        continue
                if fresh is None:
                    fresh = length**-0.5 * self.directions.draw(
                        batch.rank,
                        length,
                        dtype=out.dtype,
                        device=out.device,
                        step=None if self._warm_start else step,
                    )
                factor[kept:].copy_(fresh[kept:])

    def keep(
        self,
        matrices: Sequence[Matrices],
        mean: Tensor,
        factor_batches: Sequence[FactorBatch],
        *,
        is_left: bool,
        old: Tensor | None,
        is_finite: Sequence[Tensor] | None,
    ) -> None:
        """Keep the mean factors for the next pass, ``old`` ones (if any) of matrices that were not finite.

        ``old`` are the factors that this pass started from, if they are of the same side. ``is_finite`` tells for each
        of ``matrices`` which were finite (``None``: all); in ``mean`` the factors of the others are zero.
        """
        if not self._warm_start:
            return
        # A copy: what is kept would otherwise hold on to all that was sent with it.
        kept = self._normalize(mean.clone(), factor_batches)
        for place, each in enumerate(matrices):
            factors = each.batch.factors(kept, is_left=is_left)
            if is_finite is not None and old is not None:
                old_factors = each.batch.factors(old, is_left=is_left)
                factors.copy_(torch.where(is_finite[place][:, None, None], factors, old_factors))
            for slot, factor in zip(each.factor_slots, factors, strict=True):
                slot.factor, slot.is_left = factor, is_left

    def _normalize(self, flat: Tensor, factor_batches: Sequence[FactorBatch]) -> Tensor:
        """Scale all directions to length 1, in place; draw anew those that are zero or rounding errors.

        Products with such directions stay in the range of the gradient, in half precision too. A direction vanishes
        when the gradient had a smaller rank than the factor; a random one will find what a later gradient has more.
        """
        tiny = 8 * torch.finfo(flat.dtype).eps
        for batch in factor_batches:
            rows = batch.of(flat)
            lengths = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
            is_there = lengths > tiny * lengths.amax(dim=1, keepdim=True)
            if not has_streams(flat.device) and bool(is_there.all()):
                rows.div_(lengths)
                continue
            fresh = self.directions.draw(batch.rank, batch.length, dtype=flat.dtype, device=flat.device)
            rows.copy_(torch.where(is_there, rows / lengths, fresh * batch.length**-0.5))
        return flat


def _mix(*numbers: int) -> int:
    mixed = 0
    for number in numbers:
        mixed = (mixed * 6_364_136_223_846_793_005 + number + 1_442_695_040_888_963_407) % 2**63
    return mixed
