"""One bucket's compressed reduction: the algorithms of the two papers.

PowerSGD (Vogels, Karimireddy, Jaggi, 2019) takes one step of subspace iteration on the mean over ranks of
M = gradient plus residual, without ever forming it::

    left  = all-reduce of  M right
    left  = orthonormalize(left)
    right = all-reduce of  M.T left                 output = left right.T

Its alternating form, ACP-SGD (Zhang et al., 2023), computes one of the two a step, with the other,
orthonormalized, from the step before as the basis: one all-reduce instead of two.

[Note: the residual of a rank]

Each rank keeps what its *own* coefficients leave out: M minus basis times own coefficients. Coefficients are
linear in M, so with ``divisor * output`` the residuals add up over ranks to all that went in, whatever the
divisor is, and no rank's residual can grow by what the others do: it is at most its own M without the part in
the basis. A rank that has joined goes on in the same way with a gradient of zero, until its residual is given
away.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import all_reduce
from overlap.hooks.powersgd.config import PowerSGDConfig
from overlap.hooks.powersgd.factors import Directions, normalize
from overlap.hooks.powersgd.memory import Slot
from overlap.hooks.powersgd.operands import Operand
from overlap.hooks.powersgd.orthogonalize import orthonormalize
from overlap.hooks.powersgd.plan import Batch, Family, Plan
from overlap.hooks.powersgd.streams import hold

__all__ = ["Round"]


@dataclass(frozen=True, eq=False)
class Round:
    """What is needed for one bucket of one step."""

    bucket: Bucket
    plan: Plan
    work: Sequence[tuple[Batch, Operand, Sequence[Slot]]]
    """Each batch of the plan, with its matrices and with the slots of their factors."""
    config: PowerSGDConfig
    directions: Directions
    step: int
    """Counted from the first compressed one."""
    compute_dtype: torch.dtype

    @cached_property
    def exact(self) -> list[Tensor]:
        """The gradients that are not compressed."""
        return [self.bucket.gradients[place] for place in self.plan.exact]

    async def run(self) -> int:
        """Reduce the bucket; gives the number of elements that were sent."""
        if not self.config.alternate:
            return await self._both_factors()
        return await self._one_factor(is_left=self.step % 2 == 0)

    async def _both_factors(self) -> int:
        start = self._start(is_left=False)
        for _, operand, _ in self.work:
            operand.begin()
        left = await self._reduce(self._project(start, is_left=True), exact=True)
        sound_left = self._finite(left, is_left=True)
        self._orthonormalize(left, self.plan.left_families)
        own = self._project(left, is_left=False)
        mean = await self._reduce(own, exact=False)
        sound = _both(sound_left, self._finite(mean, is_left=False))
        self._finish(left, own, left, mean, sound)
        self._remember(mean, start, sound, is_left=False)
        return self.plan.left_numel + self.plan.right_numel + self.plan.exact_numel

    async def _one_factor(self, *, is_left: bool) -> int:
        """Send left factors, with right ones as the basis, or the other way round."""
        basis = self._start(is_left=not is_left)
        families = self.plan.right_families if is_left else self.plan.left_families
        self._orthonormalize(basis, families)
        for _, operand, _ in self.work:
            operand.begin()
        own = self._project(basis, is_left=is_left)
        mean = await self._reduce(own, exact=True)
        sound = self._finite(mean, is_left=is_left)
        if is_left:
            self._finish(own, basis, mean, basis, sound)
        else:
            self._finish(basis, own, basis, mean, sound)
        self._remember(mean, None, sound, is_left=is_left)
        return mean.numel() + self.plan.exact_numel

    def _start(self, *, is_left: bool) -> Tensor:
        """The factors to start from: those of the step before, random ones where there are none."""
        step = None if self.config.warm_start else self.step
        flat = self._empty(is_left=is_left)
        for batch, _, slots in self.work:
            length = batch.rows if is_left else batch.cols
            fresh = None
            for place, slot in zip(_side(batch, flat, is_left), slots, strict=True):
                if slot.factor is not None and slot.is_left == is_left and self.config.warm_start:
                    slot.check_factor((batch.rank, length))
                    place.copy_(hold(slot.factor))
                    continue
                if fresh is None:
                    fresh = length**-0.5 * self.directions.draw(
                        batch.rank, length, dtype=flat.dtype, device=flat.device, step=step
                    )
                place.copy_(fresh)
        return flat

    def _project(self, basis: Tensor, *, is_left: bool) -> Tensor:
        """The left factors of this rank's matrices for right ones as a basis, or the other way round."""
        flat = self._empty(is_left=is_left)
        for batch, operand, _ in self.work:
            if is_left:
                operand.left(batch.right(basis), out=batch.left(flat))
            else:
                operand.right(batch.left(basis), out=batch.right(flat))
        return flat

    async def _reduce(self, factors: Tensor, *, exact: bool) -> Tensor:
        """The mean of the factors over ranks; ``exact``: with the other gradients in the same collective."""
        dtype = self.bucket.buffer.dtype
        parts = [factors.to(dtype), *(gradient.reshape(-1) for gradient in self.exact if exact)]
        sent = torch.cat(parts)
        sent.mul_(1 / self.bucket.divisor)
        if dtype != self.compute_dtype:
            # What rounding to the wire's precision loses is lost to the others only: it stays in the
            # residual.
            factors.copy_(sent[: factors.numel()]).mul_(self.bucket.divisor)
        await all_reduce(sent, group=self.bucket.group)
        if exact:
            reduced = sent[factors.numel() :].split([gradient.numel() for gradient in self.exact])
            for gradient, part in zip(self.exact, reduced, strict=True):
                gradient.copy_(part.view_as(gradient))
        return sent[: factors.numel()].to(self.compute_dtype)

    def _finite(self, flat: Tensor, *, is_left: bool) -> list[Tensor] | None:
        """Which matrices of each batch have finite factors; ``None`` on a CPU where all have.

        A non-finite element makes its whole row of products non-finite. Factors are the same on all ranks by
        now, and so is the answer. The others' are set to zero, which every algorithm can work with.
        """
        if flat.device.type == "cpu" and bool(torch.isfinite(flat).all()):
            return None
        sound = []
        for batch, _, _ in self.work:
            factors = _side(batch, flat, is_left)
            is_finite = torch.isfinite(factors).flatten(1).all(dim=1)
            factors.copy_(torch.where(is_finite[:, None, None], factors, 0.0))
            sound.append(is_finite)
        return sound

    def _orthonormalize(self, flat: Tensor, families: Sequence[Family]) -> None:
        for family in families:
            rows = family.of(flat)
            spare = functools.partial(
                self.directions.draw, family.rank, family.length, dtype=flat.dtype, device=flat.device
            )
            rows.copy_(orthonormalize(rows, spare, epsilon=self.config.epsilon))

    def _finish(
        self, left: Tensor, right: Tensor, mean_left: Tensor, mean_right: Tensor, sound: list[Tensor] | None
    ) -> None:
        for place, (batch, operand, _) in enumerate(self.work):
            operand.finish(
                (batch.left(left), batch.right(right)),
                (batch.left(mean_left), batch.right(mean_right)),
                None if sound is None else sound[place],
            )

    def _remember(self, mean: Tensor, before: Tensor | None, sound: list[Tensor] | None, *, is_left: bool) -> None:
        """Keep the factors for the next step, those from before where this step was not sound."""
        if not self.config.warm_start:
            return
        families = self.plan.left_families if is_left else self.plan.right_families
        # Unsound ones are zero here, and come out as random directions.
        # A copy, because in memory it would hold on to all that was sent with it.
        kept = normalize(mean.clone(), families, self.directions)
        for place, (batch, _, slots) in enumerate(self.work):
            factors = _side(batch, kept, is_left)
            if sound is not None and before is not None:
                old = _side(batch, before, is_left)
                factors.copy_(torch.where(sound[place][:, None, None], factors, old))
            for slot, factor in zip(slots, factors, strict=True):
                slot.factor, slot.is_left = factor, is_left

    def _empty(self, *, is_left: bool) -> Tensor:
        numel = self.plan.left_numel if is_left else self.plan.right_numel
        return torch.empty(numel, dtype=self.compute_dtype, device=self.bucket.buffer.device)


def _side(batch: Batch, flat: Tensor, is_left: bool) -> Tensor:
    return batch.left(flat) if is_left else batch.right(flat)


def _both(first: list[Tensor] | None, second: list[Tensor] | None) -> list[Tensor] | None:
    if first is None or second is None:
        return second if first is None else first
    return [one & other for one, other in zip(first, second, strict=True)]
