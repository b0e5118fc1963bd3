"""PowerSGD's arithmetic: how one bucket is compressed, sent and decompressed.

One step of subspace iteration on the mean over ranks of M = gradient + residual, without ever forming that mean
(Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019, arXiv 1905.13727, Algorithms 1 and 2)::

    P = M Q               with the Q of the step before
    P = all-reduce(P)
    P = orthogonalize(P)
    Q = M^T P
    Q = all-reduce(Q)
    output = P Q^T

The alternating form, ACP-SGD (Zhang et al., ICDCS 2023), computes only one of the two per step, with the other one,
orthogonalized, from the step before as the basis: one all-reduce instead of two. The code calls P left factors and Q
right ones, and stores both transposed, ``(rank, length)``.

[Note: the residual of a rank]

Each rank keeps the error of its *own* coefficients: M minus basis times own coefficients. Coefficients are linear in M,
so with ``divisor * output`` the residuals add up over ranks to the sum of all inputs, whatever the divisor is, and no
rank's residual can grow because of the others: it is at most its own M without the part in the basis. A rank that has
joined continues with a gradient of zero, until its residual is delivered.

[Note: the part of a rank]

With a wire, a rank's part in the sum is its factors less its rounding errors, in its messages and in the sum of the
values that it owns. These parts add up over ranks to the mean that all decode, but for fp32's own rounding. So a rank's
residual is its matrix minus the basis times *its part*: the wire's errors in coefficients stay in the residual together
with the error of the basis, and are delivered later. Rounding to half precision is treated alike. Rounding errors in a
factor that becomes the basis are not lost gradients: any basis will do, as long as all ranks have the same.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from overlap._torch.device import has_streams, hold
from overlap._torch.foreach import all_finite, copy_all
from overlap.errors import ConfigurationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import all_reduce
from overlap.hooks.powersgd.layout import BucketLayout, FactorLayout, Factors, Matrices, columns_by_shape
from overlap.hooks.powersgd.memory import Memory
from overlap.hooks.wires import QuantizedSum, Wire

__all__ = ["PowerIteration", "cholesky_qr", "householder", "orthonormalize", "random_directions"]

_Finite = list[Tensor] | None
"""Of each batch, which of its matrices are finite on all ranks, shape ``(count,)``; ``None``: all matrices are."""


class PowerIteration:
    """The compressed reduction of one bucket in one step.

    Args:
        bucket: its gradients become the output.
        layout: of the bucket, with at least one matrix.
        keys: of its parameters in ``memory``.
        memory: residuals and factors of the step before, which become those of this one.
        error_dtype: of residuals; ``None`` without error feedback.
        wire: how factors are sent; ``None``: in the bucket's dtype.
        seed: of random directions.
        cold_step: ``None`` to start from the factors of the step before; else this step's number, for new directions.
    """

    def __init__(
        self,
        bucket: Bucket,
        layout: BucketLayout,
        keys: Sequence[str],
        memory: Memory,
        *,
        error_dtype: torch.dtype | None,
        wire: Wire | None,
        seed: int,
        cold_step: int | None,
    ) -> None:
        self.bucket = bucket
        self.layout = layout
        self.keys = keys
        self.memory = memory
        self.wire = wire
        self.seed = seed
        self.cold_step = cold_step
        self.dtype = torch.promote_types(bucket.buffer.dtype, torch.float32)
        """To compute in."""
        self.sent_numel = 0
        """Elements sent so far, in the bucket's dtype."""
        self.matrices = []
        for batch in layout.batches:
            gradients = [bucket.gradients[place] for place in batch.places]
            residuals = None
            if error_dtype is not None:
                found = zip(batch.places, gradients, strict=True)
                residuals = [memory.residual(keys[place], gradient, error_dtype) for place, gradient in found]
            self.matrices.append(Matrices(batch, gradients, residuals, self.dtype))

    async def both_factors(self) -> None:
        """PowerSGD: two all-reduces, of P and of Q."""
        q_before = self._start(self.layout.right)
        own_p = self._times(q_before)  # P = M Q
        p = await self._mean(own_p, with_exact=True)
        is_finite = self._zero_non_finite(p)
        self._orthonormalize(p)
        own_q = self._transposed_times(p)  # Q = M^T P
        q = await self._mean(own_q)
        is_finite = self._zero_non_finite(q, is_finite)
        self._decompress((p, own_q), (p, q), is_finite)  # output = P Q^T
        self._keep(q, is_finite, before=q_before)

    async def left_factors(self) -> None:
        """ACP-SGD, every other step: one all-reduce, of P; the basis is the Q of the step before."""
        q = self._start(self.layout.right)
        self._orthonormalize(q)
        own_p = self._times(q)  # P = M Q
        p = await self._mean(own_p, with_exact=True)
        is_finite = self._zero_non_finite(p)
        self._decompress((own_p, q), (p, q), is_finite)  # output = P Q^T
        self._keep(p, is_finite)

    async def right_factors(self) -> None:
        """ACP-SGD, the steps between: one all-reduce, of Q; the basis is the P of the step before."""
        p = self._start(self.layout.left)
        self._orthonormalize(p)
        own_q = self._transposed_times(p)  # Q = M^T P
        q = await self._mean(own_q, with_exact=True)
        is_finite = self._zero_non_finite(q)
        self._decompress((p, own_q), (p, q), is_finite)  # output = P Q^T
        self._keep(q, is_finite)

    def _start(self, layout: FactorLayout) -> Factors:
        """The factors of the step before; random directions where there are none.

        Of a factor that was saved with another rank, the first directions, which are the leading ones, stay, and random
        ones are appended.

        Raises:
            ConfigurationError: a factor that was loaded has directions of another length.
        """
        factors = self._empty(layout)
        before = self.memory.left if layout.is_left else self.memory.right
        targets, sources = [], []
        for batch, of_batch in zip(self.layout.batches, factors.of_batches, strict=True):
            rank, length = of_batch.shape[1:]
            for place, factor in zip(batch.places, of_batch.unbind(), strict=True):
                target = self._by_shape(factor, place, layout)
                found = before.get(self.keys[place]) if self.cold_step is None else None
                if found is not None:
                    self._check_length(found, length, place)
                if found is None or len(found) != rank:
                    fresh = self._random(rank, length, step=self.cold_step) * length**-0.5
                    target.copy_(fresh.view(target.shape))
                if found is not None:
                    found = hold(found)[:rank]
                    targets.append(target[: len(found)])
                    sources.append(found.view(targets[-1].shape))
        copy_all(targets, sources)
        return factors

    def _keep(self, mean: Factors, is_finite: _Finite, *, before: Factors | None = None) -> None:
        """Keep the mean factors for the next step, those ``before`` (if given) of matrices that were not finite."""
        if self.cold_step is not None:
            return
        # A copy: the factors would otherwise keep all that was sent with them alive.
        kept = Factors(mean.layout, mean.flat.clone())
        self._normalize(kept)
        here, there = self.memory.left, self.memory.right
        if not mean.layout.is_left:
            here, there = there, here
        for index, (batch, of_batch) in enumerate(zip(self.layout.batches, kept.of_batches, strict=True)):
            if is_finite is not None and before is not None:
                of_batch.copy_(torch.where(is_finite[index][:, None, None], of_batch, before.of_batches[index]))
            for place, factor in zip(batch.places, of_batch.unbind(), strict=True):
                here[self.keys[place]] = self._by_shape(factor, place, kept.layout).reshape(factor.shape)
                there.pop(self.keys[place], None)

    def _normalize(self, factors: Factors) -> None:
        """Scale all directions to length 1, in place; draw anew those that are zero or rounding errors.

        Products with such directions stay in the range of the gradient, in half precision too. A direction vanishes
        when the gradient had a smaller rank than the factor; a random one can find a direction of a later gradient.
        """
        tiny = 8 * torch.finfo(self.dtype).eps
        for rows in factors.alike:
            lengths = _length(rows)
            is_there = lengths > tiny * lengths.amax(dim=1, keepdim=True)
            if not has_streams(rows.device) and bool(is_there.all()):
                rows.div_(lengths)
                continue
            _, rank, length = rows.shape
            rows.copy_(torch.where(is_there, rows / lengths, self._random(rank, length) * length**-0.5))

    def _times(self, q: Factors) -> Factors:
        """P = M Q of this rank's matrices."""
        p = self._empty(self.layout.left)
        for matrices, right, left in zip(self.matrices, q.of_batches, p.of_batches, strict=True):
            matrices.times(right, out=left)
        return p

    def _transposed_times(self, p: Factors) -> Factors:
        """Q = M^T P of this rank's matrices."""
        q = self._empty(self.layout.right)
        for matrices, left, right in zip(self.matrices, p.of_batches, q.of_batches, strict=True):
            matrices.transposed_times(left, out=right)
        return q

    def _decompress(self, own: tuple[Factors, Factors], mean: tuple[Factors, Factors], is_finite: _Finite) -> None:
        """Output = P Q^T of the mean factors; residual = M - P Q^T of this rank's own."""
        own_factors = zip(own[0].of_batches, own[1].of_batches, strict=True)
        mean_factors = zip(mean[0].of_batches, mean[1].of_batches, strict=True)
        verdicts = itertools.repeat(None) if is_finite is None else is_finite
        for matrices, of_own, of_mean, verdict in zip(self.matrices, own_factors, mean_factors, verdicts, strict=False):
            matrices.decompress(of_own, of_mean, verdict)

    async def _mean(self, factors: Factors, *, with_exact: bool = False) -> Factors:
        """The mean of factors over ranks; ``factors`` become this rank's part in it, times the divisor.

        ``with_exact``: the uncompressed gradients are reduced, too, in the same all-reduce unless factors have a wire.
        """
        exact = [self.bucket.gradients[place] for place in self.layout.exact] if with_exact else []
        is_scaled = self.bucket.buffer.dtype == torch.float16
        if is_scaled:
            self._scale_(factors, is_down=True)
        if self.wire is None:
            flat = await self._all_reduce(factors.flat, exact)
        else:
            await self._all_reduce(factors.flat[:0], exact)
            flat = await self._sum_by(self.wire, factors.flat)
        mean = Factors(factors.layout, flat)
        if is_scaled:
            self._scale_(factors, is_down=False)
            self._scale_(mean, is_down=False)
        return mean

    async def _all_reduce(self, flat: Tensor, exact: Sequence[Tensor]) -> Tensor:
        """The mean of factors, and that of gradients, in place, by one all-reduce in the bucket's dtype."""
        numel, dtype, factor = flat.numel(), self.bucket.buffer.dtype, 1 / self.bucket.divisor
        sent = torch.cat([(flat * factor).to(dtype), *(gradient.reshape(-1) for gradient in exact)])
        if sent.numel() == 0:
            return flat
        sent[numel:].mul_(factor)
        if dtype != self.dtype:
            # Rounding errors of the bucket's dtype are not sent, so they have to stay in the residual.
            flat.copy_(sent[:numel]).mul_(self.bucket.divisor)
        await all_reduce(sent, group=self.bucket.group)
        self.sent_numel += sent.numel()
        parts = sent[numel:].split([gradient.numel() for gradient in exact])
        copy_all(exact, [part.view_as(gradient) for part, gradient in zip(parts, exact, strict=True)])
        return sent[:numel].to(self.dtype)

    async def _sum_by(self, wire: Wire, flat: Tensor) -> Tensor:
        """The mean of factors by messages of ``wire``, the same on every rank bit for bit."""
        bucket = self.bucket
        group, ranks = bucket.group, bucket.group.size()
        generator = self.memory.generator_for(wire, group.rank(), flat.device)
        quantized_sum = QuantizedSum.of(flat.numel(), wire=wire, generator=generator, group=group)
        values = flat.mul(1 / bucket.divisor).float()
        errors, mean = values.clone(), torch.empty_like(values)
        await quantized_sum(errors, out=mean)
        flat.copy_(values.sub_(errors)).mul_(bucket.divisor)
        sent_bytes = ranks * quantized_sum.codec.message_bytes
        self.sent_numel += math.ceil(sent_bytes / bucket.buffer.dtype.itemsize) if ranks > 1 else flat.numel()
        return mean.to(self.dtype)

    def _scale_(self, factors: Factors, *, is_down: bool) -> None:
        """Scale factors for ``float16``, which holds no more than 65504, by powers of two, which round nothing.

        An element is a product with a direction of length 1, so it is larger than all of the matrix by at most the root
        of that direction's number of elements. Outputs below the range of full precision can change by a few of the
        smallest steps of ``float16``, which are 6e-8.
        """
        for batch, of_batch in zip(self.layout.batches, factors.of_batches, strict=True):
            summed = batch.cols if factors.layout.is_left else batch.rows
            exponent = math.ceil(math.log2(summed) / 2)
            of_batch.mul_(2.0 ** (-exponent if is_down else exponent))

    def _zero_non_finite(self, factors: Factors, before: _Finite = None) -> _Finite:
        """Zero the factors of matrices that are not finite; returns which are, here and ``before``.

        A non-finite element makes its whole row of products non-finite. The factors are already the same on all ranks,
        and so is the answer. All that follows can work with zeros.
        """
        if not has_streams(factors.flat.device) and bool(all_finite(factors.flat)):
            return before
        found = []
        for of_batch in factors.of_batches:
            is_finite = torch.isfinite(of_batch).flatten(1).all(dim=1)
            of_batch.copy_(torch.where(is_finite[:, None, None], of_batch, 0.0))
            found.append(is_finite)
        return found if before is None else [one & other for one, other in zip(found, before, strict=True)]

    def _orthonormalize(self, factors: Factors) -> None:
        for rows in factors.alike:
            rows.copy_(orthonormalize(rows, functools.partial(self._random, *rows.shape[1:])))

    def _random(self, rank: int, length: int, *, step: int | None = None) -> Tensor:
        """Random directions ``(rank, length)``: of one ``step``, or the same in all steps."""
        device, kept = self.bucket.buffer.device, self.memory.directions
        key = (self.seed, rank, length, self.dtype, device)
        if step is None and key in kept:
            return hold(kept[key])
        drawn = random_directions(rank, length, seed=self.seed, step=step, dtype=self.dtype, device=device)
        if step is None:
            kept[key] = drawn
        return drawn

    def _empty(self, layout: FactorLayout) -> Factors:
        return Factors(layout, torch.empty(layout.numel, dtype=self.dtype, device=self.bucket.buffer.device))

    def _by_shape(self, factor: Tensor, place: int, layout: FactorLayout) -> Tensor:
        """A factor with columns in the order of the gradient's shape, the order in which factors are kept."""
        return factor if layout.is_left else columns_by_shape(factor, self.bucket.gradients[place])

    def _check_length(self, factor: Tensor, length: int, place: int) -> None:
        if factor.ndim != 2 or factor.shape[1] != length:
            raise ConfigurationError(
                f"the factor of parameter {self.keys[place]} has shape {tuple(factor.shape)}, but here its directions "
                f"have {length} elements: the state comes from another model; to keep the residuals and start new "
                "factors, load it with state['factors'] = {}"
            )


def random_directions(
    rank: int, length: int, *, seed: int, step: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Rows of a random matrix ``(rank, length)``, the same on every rank: they follow from the arguments alone."""
    mixed = 0
    for number in (seed, rank, length, 0 if step is None else step + 1):
        mixed = (mixed * 6_364_136_223_846_793_005 + number + 1_442_695_040_888_963_407) % 2**63
    # Seeding a generator of its own leaves the user's alone, and on an accelerator it costs no synchronization.
    generator = torch.Generator(device=device).manual_seed(mixed)
    return torch.randn(rank, length, generator=generator, dtype=dtype, device=device)


def orthonormalize(rows: Tensor, spare: Callable[[], Tensor]) -> Tensor:
    """An orthonormal basis of the span of each batch of rows, at most ``length`` of them.

    It is always a whole basis: where rows are zero or depend on each other, arbitrary directions are added, so a zero
    gradient needs no guard. No value is read on the host.

    On a CPU Householder's QR is the fastest at every shape that matters. Accelerators run it one matrix after another,
    so there it serves ``float64`` alone, which Cholesky-QR cannot do in a wider dtype.

    Args:
        rows: ``(count, rank, length)``, ``float32`` or ``float64``, finite.
        spare: returns ``(rank, length)``, random directions for rows that vanish.
    """
    if has_streams(rows.device) and rows.dtype != torch.float64:
        return cholesky_qr(rows, spare())
    return householder(rows)


def householder(rows: Tensor) -> Tensor:
    """By Householder reflections, stable for any rows."""
    basis: Tensor = torch.linalg.qr(rows.mT)[0].mT
    return basis


def cholesky_qr(rows: Tensor, spare: Tensor) -> Tensor:
    """By two rounds of Cholesky-QR in ``float64``: products and small triangles, which accelerators like.

    Rounding has made the rows uncertain by their dtype's epsilon, so a few times that is added to them in random
    directions. That bounds the condition number, so the Gram matrix of dependent rows can be factorized, too, in
    ``float64``. Should it fail even so, the first unit vectors are the basis; error feedback makes up for it.
    """
    floor = 16 * torch.finfo(torch.float32).eps
    wide = rows.double()
    scale = _length(wide)
    basis = torch.where(scale > 0, wide / scale, 0.0) + floor * (spare.double() / _length(spare.double()))
    for _ in range(2):
        # cholesky_ex and not cholesky, which reads on the host whether it succeeded.
        lower, _ = torch.linalg.cholesky_ex(basis @ basis.mT)
        basis = torch.linalg.solve_triangular(lower, basis, upper=False)
    is_whole = torch.isfinite(basis).flatten(1).all(dim=1)[:, None, None]
    unit = torch.eye(rows.shape[1], rows.shape[2], dtype=basis.dtype, device=basis.device)
    return torch.where(is_whole, basis, unit).to(rows.dtype)


def _length(rows: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return length
