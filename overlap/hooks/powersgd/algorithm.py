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

[Note: what the wire leaves out of factors]

A rank's part in the sum is what the others decode of its messages, and for the part of the values that it owns, less
what rounding the sum loses. These parts add up over ranks to the mean that all decode, exactly but for fp32's own
rounding. So a rank's residual is its matrix minus the basis times *its part*: what the wire left out of coefficients
stays in the residual together with what the basis left out, and comes again. Rounding errors in a factor that becomes
the basis are not lost gradients: any basis will do, as long as all ranks have the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap._torch.device import has_streams, hold
from overlap._torch.foreach import copy_all
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import all_reduce
from overlap.hooks.finite import all_finite
from overlap.hooks.powersgd.layout import BucketLayout, FactorBatch, Matrices
from overlap.hooks.wires import QuantizedSum, RoundingGenerator, Wire

__all__ = [
    "Bases",
    "Directions",
    "PowerIteration",
    "WiredMean",
    "cholesky_qr",
    "gram_schmidt",
    "householder",
    "orthonormalize",
]

# Below these ranks the loop of Gram-Schmidt is fewer kernels than Cholesky-QR.
_GRAM_SCHMIDT_RANK = 2


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

    async def both_factors(self) -> int:
        """PowerSGD: reduce the bucket by two all-reduces; returns how many elements were sent."""
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
        return self._sent_numel(p, q)

    async def one_factor(self, *, is_left: bool) -> int:
        """ACP-SGD: reduce the bucket by one all-reduce, of P or of Q only; returns how many elements were sent."""
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
        return self._sent_numel(mean)

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

    def _sent_numel(self, *sent: Tensor) -> int:
        numels = [factors.numel() for factors in sent]
        if self.wired is not None:
            numels = [self.wired.sent_numel(numel, self.bucket) for numel in numels]
        return sum(numels) + self.layout.exact_numel

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


class Directions:
    """Random directions, the same on every rank: they follow from the seed, the shape and the step alone.

    Those of a warm start do not depend on the step and are kept, one set per shape; the others are drawn at each step.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._kept: dict[tuple[object, ...], Tensor] = {}

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

        Of a factor that was saved with another rank, the first directions, which are the leading ones, stay, and random
        ones come behind them.

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


@dataclass(frozen=True)
class WiredMean:
    """The mean of factors, by messages of ``wire`` and a gather of encoded sums."""

    wire: Wire
    generator: RoundingGenerator

    async def __call__(self, factors: Tensor, bucket: Bucket) -> Tensor:
        """The mean, the same on every rank bit for bit; changes ``factors`` to this rank's part, times the divisor."""
        values = factors.mul(1 / bucket.divisor).float()
        mean = torch.empty_like(values)
        if bucket.group.size() > 1:
            left_out = values.clone()
            await self._sum(values.numel(), bucket)(left_out, out=mean)
            values.sub_(left_out)
        else:
            mean.copy_(values)
        factors.copy_(values).mul_(bucket.divisor)
        return mean.to(factors.dtype)

    def sent_numel(self, numel: int, bucket: Bucket) -> int:
        """The elements of the bucket's dtype that ``numel`` values have the bytes of."""
        if bucket.group.size() == 1:
            return numel
        message_bytes = self._sum(numel, bucket).codec.message_bytes
        return math.ceil(bucket.group.size() * message_bytes / bucket.buffer.dtype.itemsize)

    def _sum(self, numel: int, bucket: Bucket) -> QuantizedSum:
        generator = self.generator.of(bucket.group.rank(), bucket.buffer.device)
        return QuantizedSum.of(numel, wire=self.wire, generator=generator, group=bucket.group)


def orthonormalize(rows: Tensor, spare: Callable[[], Tensor], *, epsilon: float = 0.0) -> Tensor:
    """An orthonormal basis of the span of each batch of rows, at most ``length`` of them.

    All algorithms always give a whole basis: where rows are zero or depend on each other, directions of no particular
    kind fill the place, so a zero gradient needs no guard. None of them reads a value on the host.

    On a CPU Householder's QR is the fastest of the three at every shape that matters. Accelerators run it one
    matrix after another, so there it serves ``float64`` alone, which Cholesky-QR cannot do in a wider dtype.

    Args:
        rows: ``(count, rank, length)``, ``float32`` or ``float64``, finite.
        spare: gives ``(rank, length)``, random directions for where rows vanish.
        epsilon: each direction is scaled by ``d / (d + epsilon)``, where ``d`` is the length that its row
            adds to the span of the ones before it.
    """
    if not has_streams(rows.device) or (rows.dtype == torch.float64 and rows.shape[1] > _GRAM_SCHMIDT_RANK):
        basis, lengths = householder(rows)
    elif rows.shape[1] <= _GRAM_SCHMIDT_RANK:
        basis, lengths = gram_schmidt(rows, spare())
    else:
        basis, lengths = cholesky_qr(rows, spare())
    if epsilon == 0.0:
        return basis
    return basis * (lengths / (lengths + epsilon)).unsqueeze(-1)


def householder(rows: Tensor) -> tuple[Tensor, Tensor]:
    """By Householder reflections, stable for any rows; with each row's added length, ``(count, rank)``."""
    q, r = torch.linalg.qr(rows.mT)
    return q.mT, r.diagonal(dim1=-2, dim2=-1).abs()


def gram_schmidt(rows: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """By Gram-Schmidt with each row projected three times, since once leaves the error of cancellation in."""
    tiny = 4 * torch.finfo(rows.dtype).eps
    basis = torch.zeros_like(rows)
    lengths = []
    for place in range(rows.shape[1]):
        row = rows[:, place : place + 1]
        before = basis[:, :place]
        left = row - (row @ before.mT) @ before
        length = _length(left)
        is_new = length > tiny * _length(row)
        left = torch.where(is_new, left, spare[place])
        # Lengths of 1, so that squares of very small or large elements stay within range.
        left = left / _length(left)
        for _ in range(2):
            left = left - (left @ before.mT) @ before
        basis[:, place : place + 1] = left / _length(left)
        lengths.append(torch.where(is_new, length, 0.0).flatten())
    return basis, torch.stack(lengths, dim=1)


def cholesky_qr(rows: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """By two rounds of Cholesky-QR in ``float64``: products and small triangles, which accelerators like.

    Rounding has made the rows uncertain by their dtype's epsilon, so a few times that is added to them in
    random directions. That bounds the condition number, and with it the Gram matrix of dependent rows can be
    factorized too, in ``float64``. Should it fail even so, the first unit vectors are the basis; error
    feedback makes up for it.
    """
    floor = 16 * torch.finfo(torch.float32).eps
    wide = rows.double()
    scale = _length(wide)
    wide = torch.where(scale > 0, wide / scale, 0.0)
    wide = wide + floor * (spare.double() / _length(spare.double()))
    basis, lower = _cholesky_round(wide)
    basis, _ = _cholesky_round(basis)
    is_whole = torch.isfinite(basis).flatten(1).all(dim=1)[:, None, None]
    unit = torch.eye(rows.shape[1], rows.shape[2], dtype=basis.dtype, device=basis.device)
    lengths = scale.flatten(1) * lower.diagonal(dim1=-2, dim2=-1)
    return torch.where(is_whole, basis, unit).to(rows.dtype), lengths.nan_to_num(0.0).clamp(min=0).to(rows.dtype)


def _cholesky_round(rows: Tensor) -> tuple[Tensor, Tensor]:
    # cholesky_ex and not cholesky, which reads on the host whether it went well.
    lower, _ = torch.linalg.cholesky_ex(rows @ rows.mT)
    return torch.linalg.solve_triangular(lower, rows, upper=False), lower


def _length(rows: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return length
