"""PowerSGD's arithmetic: how one bucket is compressed, sent and put together.

One step of subspace iteration on the mean over ranks of M = gradient + residual, without ever forming that mean
(Vogels, Karimireddy, Jaggi, 2019)::

    P = M Q               with the Q of the step before
    P = all-reduce(P)
    P = orthogonalize(P)
    Q = M^T P
    Q = all-reduce(Q)
    output = P Q^T

The alternating form, ACP-SGD (Zhang et al., 2023), computes only one of the two per step, with the other one,
orthogonalized, from the step before as the basis: one all-reduce instead of two. The code calls P left factors and Q
right ones, and stores both with their directions in rows.

[Note: the residual of a rank]

Each rank keeps what its *own* coefficients leave out: M minus basis times own coefficients. Coefficients are linear in
M, so with ``divisor * output`` the residuals add up over ranks to all that went in, whatever the divisor is, and no
rank's residual can grow by what the others do: it is at most its own M without the part in the basis. A rank that has
joined goes on in the same way with a gradient of zero, until its residual is given away.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from overlap._torch.device import has_streams
from overlap._torch.foreach import copy_all
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import all_reduce
from overlap.hooks.finite import all_finite
from overlap.hooks.powersgd.bases import Bases
from overlap.hooks.powersgd.layout import BucketLayout
from overlap.hooks.powersgd.matrices import Matrices
from overlap.hooks.powersgd.orthogonalize import orthonormalize
from overlap.hooks.powersgd.wired import WiredMean

__all__ = ["Compressed", "PowerIteration"]


class Compressed(NamedTuple):
    """What became of a bucket."""

    layout: BucketLayout
    basis: Tensor
    """All factors that the gradients were projected on; orthonormal but for ``epsilon``."""
    is_left: bool
    """Whether these are the left ones."""
    sent_numel: int


@dataclass(frozen=True, eq=False, kw_only=True)
class PowerIteration:
    """The compressed reduction of one bucket in one step."""

    bucket: Bucket
    layout: BucketLayout
    matrices: Sequence[Matrices]
    """Of each batch of the layout."""
    bases: Bases
    step: int
    """Counted from the first compressed one."""
    compute_dtype: torch.dtype
    epsilon: float
    """Added to the length that each direction of a basis is divided by."""
    wired: WiredMean | None = None
    """How the mean of factors is taken; ``None``: by an all-reduce in the bucket's dtype."""

    async def both_factors(self) -> Compressed:
        """PowerSGD: reduce the bucket by two all-reduces."""
        old_q = self._start(is_left=False)
        self._begin()
        p = await self._mean(self._multiply(old_q, is_left=True), is_left=True, with_exact=True)
        p_finite = self._zero_non_finite(p, is_left=True)
        self._orthogonalize(p, is_left=True)
        own_q = self._multiply(p, is_left=False)
        q = await self._mean(own_q, is_left=False, with_exact=False)
        is_finite = _both(p_finite, self._zero_non_finite(q, is_left=False))
        self._finish(own=(p, own_q), mean=(p, q), is_finite=is_finite)
        self._keep(q, is_left=False, old=old_q, is_finite=is_finite)
        return self._compressed(p, is_left=True, sent=(p, q))

    async def one_factor(self, *, is_left: bool) -> Compressed:
        """ACP-SGD: reduce the bucket by one all-reduce, of P or of Q only."""
        basis = self._start(is_left=not is_left)
        self._orthogonalize(basis, is_left=not is_left)
        self._begin()
        own = self._multiply(basis, is_left=is_left)
        mean = await self._mean(own, is_left=is_left, with_exact=True)
        is_finite = self._zero_non_finite(mean, is_left=is_left)
        if is_left:
            self._finish(own=(own, basis), mean=(mean, basis), is_finite=is_finite)
        else:
            self._finish(own=(basis, own), mean=(basis, mean), is_finite=is_finite)
        self._keep(mean, is_left=is_left, old=None, is_finite=is_finite)
        return self._compressed(basis, is_left=not is_left, sent=(mean,))

    def _start(self, *, is_left: bool) -> Tensor:
        flat = self._empty(is_left=is_left)
        self.bases.start(self.matrices, is_left=is_left, step=self.step, out=flat)
        return flat

    def _begin(self) -> None:
        """M = gradient + residual."""
        for each in self.matrices:
            each.begin()

    def _multiply(self, basis: Tensor, *, is_left: bool) -> Tensor:
        """P = M Q, or Q = M^T P, of this rank's matrices; ``is_left``: the result is P."""
        flat = self._empty(is_left=is_left)
        for each in self.matrices:
            if is_left:
                each.multiply(each.batch.right(basis), out=each.batch.left(flat))
            else:
                each.multiply_transposed(each.batch.left(basis), out=each.batch.right(flat))
        return flat

    def _compressed(self, basis: Tensor, *, is_left: bool, sent: Sequence[Tensor]) -> Compressed:
        numels = [factors.numel() for factors in sent]
        if self.wired is not None:
            numels = [self.wired.sent_numel(numel, self.bucket) for numel in numels]
        return Compressed(self.layout, basis, is_left, sum(numels) + self.layout.exact_numel)

    async def _mean(self, factors: Tensor, *, is_left: bool, with_exact: bool) -> Tensor:
        """The mean of the factors over ranks; changes ``factors`` to what was sent of them.

        ``with_exact``: the uncompressed gradients are reduced, too, in the same all-reduce unless factors have a wire.
        """
        exact = [self.bucket.gradients[place] for place in self.layout.exact] if with_exact else []
        dtype = self.bucket.buffer.dtype
        is_scaled = dtype == torch.float16
        if is_scaled:
            self._scale_(factors, is_left=is_left, is_down=True)
        if self.wired is not None:
            await self._reduce(exact)
            mean = await self.wired(factors, self.bucket)
            if is_scaled:
                self._scale_(factors, is_left=is_left, is_down=False)
                self._scale_(mean, is_left=is_left, is_down=False)
            return mean
        if is_scaled:
            factors.mul_(1 / self.bucket.divisor)
        sent = torch.cat([factors.to(dtype), *(gradient.reshape(-1) for gradient in exact)])
        sent[factors.numel() if is_scaled else 0 :].mul_(1 / self.bucket.divisor)
        if dtype != self.compute_dtype:
            # What rounding to the bucket's dtype loses is not sent, so it has to stay in the residual.
            factors.copy_(sent[: factors.numel()]).mul_(self.bucket.divisor)
        if is_scaled:
            self._scale_(factors, is_left=is_left, is_down=False)
        await all_reduce(sent, group=self.bucket.group)
        _put_back(sent[factors.numel() :], exact)
        mean = sent[: factors.numel()].to(self.compute_dtype)
        if is_scaled:
            self._scale_(mean, is_left=is_left, is_down=False)
        return mean

    async def _reduce(self, exact: Sequence[Tensor]) -> None:
        """The mean of the uncompressed gradients, by an all-reduce of their own."""
        if exact:
            sent = torch.cat([gradient.reshape(-1) for gradient in exact]).mul_(1 / self.bucket.divisor)
            await all_reduce(sent, group=self.bucket.group)
            _put_back(sent, exact)

    def _scale_(self, factors: Tensor, *, is_left: bool, is_down: bool) -> None:
        """Scale factors for ``float16``, which holds no more than 65504, by powers of two, which round nothing.

        An element is a product with a direction of length 1, so it can be larger than all of the matrix by the root of
        that direction's number of elements, and no more. By that it is scaled. Outputs below the range of full
        precision can change by a few of the smallest steps of ``float16``, which are 6e-8.
        """
        for each in self.matrices:
            summed = each.batch.cols if is_left else each.batch.rows
            exponent = math.ceil(math.log2(summed) / 2)
            each.batch.factors(factors, is_left=is_left).mul_(2.0 ** (-exponent if is_down else exponent))

    def _zero_non_finite(self, flat: Tensor, *, is_left: bool) -> list[Tensor] | None:
        """Zero the factors of matrices that are not finite, and tell which are; ``None`` on a CPU if all are finite.

        A non-finite element makes its whole row of products non-finite. The factors are already the same on all ranks,
        and so is the answer. All that follows can work with zeros.
        """
        if not has_streams(flat.device) and bool(all_finite(flat)):
            return None
        found = []
        for each in self.matrices:
            factors = each.batch.factors(flat, is_left=is_left)
            is_finite = torch.isfinite(factors).flatten(1).all(dim=1)
            factors.copy_(torch.where(is_finite[:, None, None], factors, 0.0))
            found.append(is_finite)
        return found

    def _orthogonalize(self, flat: Tensor, *, is_left: bool) -> None:
        for batch in self.layout.factors(is_left=is_left):
            rows = batch.of(flat)
            spare = functools.partial(
                self.bases.directions.draw, batch.rank, batch.length, dtype=flat.dtype, device=flat.device
            )
            rows.copy_(orthonormalize(rows, spare, epsilon=self.epsilon))

    def _finish(
        self, *, own: tuple[Tensor, Tensor], mean: tuple[Tensor, Tensor], is_finite: list[Tensor] | None
    ) -> None:
        """Output = P Q^T of the mean factors; residual = M - P Q^T of this rank's own."""
        for place, each in enumerate(self.matrices):
            each.finish(
                (each.batch.left(own[0]), each.batch.right(own[1])),
                (each.batch.left(mean[0]), each.batch.right(mean[1])),
                None if is_finite is None else is_finite[place],
            )

    def _keep(self, mean: Tensor, *, is_left: bool, old: Tensor | None, is_finite: list[Tensor] | None) -> None:
        batches = self.layout.factors(is_left=is_left)
        self.bases.keep(self.matrices, mean, batches, is_left=is_left, old=old, is_finite=is_finite)

    def _empty(self, *, is_left: bool) -> Tensor:
        numel = self.layout.left_numel if is_left else self.layout.right_numel
        return torch.empty(numel, dtype=self.compute_dtype, device=self.bucket.buffer.device)


def _put_back(flat: Tensor, gradients: Sequence[Tensor]) -> None:
    parts = flat.split([gradient.numel() for gradient in gradients])
    copy_all(gradients, [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)])


def _both(first: list[Tensor] | None, second: list[Tensor] | None) -> list[Tensor] | None:
    if first is None or second is None:
        return second if first is None else first
    return [one & other for one, other in zip(first, second, strict=True)]
