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

Each rank keeps what its *own* coefficients leave out: M minus basis times own coefficients. Coefficients are linear in
M, so with ``divisor * output`` the residuals add up over ranks to all that went in, whatever the divisor is, and no
rank's residual can grow by what the others do: it is at most its own M without the part in the basis. A rank that has
joined goes on in the same way with a gradient of zero, until its residual is given away.

[Note: the part of a rank]

With a wire, a rank's part in the sum is its factors less the rounding errors that it made, in its messages and in the
sum of the values that it owns. These parts add up over ranks to the mean that all decode, but for fp32's own rounding.
So a rank's residual is its matrix minus the basis times *its part*: what the wire left out of coefficients stays in the
residual together with what the basis left out, and is sent later. Rounding to half precision is treated alike. Rounding
errors in a factor that becomes the basis are not lost gradients: any basis will do, as long as all ranks have the same.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from overlap._torch.device import has_streams, hold
from overlap._torch.foreach import copy_all
from overlap.errors import ConfigurationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import all_reduce
from overlap.hooks.finite import all_finite
from overlap.hooks.powersgd.config import PowerSGDConfig
from overlap.hooks.powersgd.layout import BucketLayout, FactorLayout, Factors, Matrices, columns_by_shape
from overlap.hooks.powersgd.memory import Memory
from overlap.hooks.wires import QuantizedSum, Wire

__all__ = [
    "PowerIteration",
    "cholesky_qr",
    "gram_schmidt",
    "householder",
    "orthonormalize",
    "random_directions",
]

# Up to this rank the loop of Gram-Schmidt is fewer kernels than Cholesky-QR.
_GRAM_SCHMIDT_RANK = 2

_Finite = list[Tensor] | None
"""Of each batch, which of its matrices are finite on all ranks, shape ``(count,)``; ``None``: all matrices are."""


class PowerIteration:
    """The compressed reduction of one bucket in one step.

    Args:
        bucket: its gradients become the output.
        layout: of the bucket, with at least one matrix.
        keys: of its parameters in ``memory``.
        memory: residuals and factors of the step before, which become those of this one.
        config: the options.
        step: counted from the first compressed one.
    """

    def __init__(
        self,
        bucket: Bucket,
        layout: BucketLayout,
        keys: Sequence[str],
        memory: Memory,
        config: PowerSGDConfig,
        *,
        step: int,
    ) -> None:
        self.bucket = bucket
        self.layout = layout
        self.keys = keys
        self.memory = memory
        self.config = config
        self.step = step
        self.dtype = config.compute_dtype(bucket.buffer.dtype)
        self.sent_numel = 0
        """Elements sent so far, in the bucket's dtype."""
        error_dtype = config.residual_dtype(bucket.buffer.dtype)
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
            fresh = None
            for place, factor in zip(batch.places, of_batch.unbind(), strict=True):
                target = self._by_shape(factor, place, layout)
                found = before.get(self.keys[place]) if self.config.warm_start else None
                if found is not None:
                    _check_factor(found, length, self.keys[place])
                if found is None or len(found) != rank:
                    if fresh is None:
                        step = None if self.config.warm_start else self.step
                        fresh = self._random(rank, length, step=step) * length**-0.5
                    target.copy_(fresh.view(target.shape))
                    if found is None:
                        continue
                    target, found = target[: len(found)], found[:rank]
                targets.append(target)
                sources.append(hold(found).view(target.shape))
        copy_all(targets, sources)
        return factors

    def _keep(self, mean: Factors, is_finite: _Finite, *, before: Factors | None = None) -> None:
        """Keep the mean factors for the next step, those ``before`` (if given) of matrices that were not finite."""
        if not self.config.warm_start:
            return
        # A copy: the factors would otherwise hold on to all that was sent with them.
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
        when the gradient had a smaller rank than the factor; a random one will find what a later gradient has more.
        """
        tiny = 8 * torch.finfo(self.dtype).eps
        for rows in factors.alike:
            lengths = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
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
        if self.config.wire is None:
            flat = await self._all_reduce(factors.flat, exact)
        else:
            await self._all_reduce(factors.flat[:0], exact)
            flat = await self._sum_by(self.config.wire, factors.flat)
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
        generator = self.memory.rounding(wire).of(group.rank(), flat.device)
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

        An element is a product with a direction of length 1, so it can be larger than all of the matrix by the root of
        that direction's number of elements, and no more. By that it is scaled. Outputs below the range of full
        precision can change by a few of the smallest steps of ``float16``, which are 6e-8.
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
            spare = functools.partial(self._random, *rows.shape[1:])
            rows.copy_(orthonormalize(rows, spare, epsilon=self.config.epsilon))

    def _random(self, rank: int, length: int, *, step: int | None = None) -> Tensor:
        """Random directions ``(rank, length)``: of one ``step``, or the same in all steps."""
        device, kept = self.bucket.buffer.device, self.memory.directions
        key = (self.config.seed, rank, length, self.dtype, device)
        if step is None and key in kept:
            return hold(kept[key])
        drawn = random_directions(rank, length, seed=self.config.seed, step=step, dtype=self.dtype, device=device)
        if step is None:
            kept[key] = drawn
        return drawn

    def _empty(self, layout: FactorLayout) -> Factors:
        return Factors(layout, torch.empty(layout.numel, dtype=self.dtype, device=self.bucket.buffer.device))

    def _by_shape(self, factor: Tensor, place: int, layout: FactorLayout) -> Tensor:
        """A factor with columns in the order of the gradient's shape, the order in which factors are kept."""
        gradient = self.bucket.gradients[place]
        return factor if layout.is_left or gradient.ndim == 2 else columns_by_shape(factor, gradient)


def _check_factor(factor: Tensor, length: int, key: str) -> None:
    """Raises: ConfigurationError: the directions of ``factor`` do not have ``length`` elements."""
    if factor.ndim != 2 or factor.shape[1] != length:
        raise ConfigurationError(
            f"the factor of parameter {key} has shape {tuple(factor.shape)}, but here its directions have "
            f"{length} elements: the state comes from another model; to go on with the residuals and new factors, "
            "load it with state['factors'] = {}"
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
