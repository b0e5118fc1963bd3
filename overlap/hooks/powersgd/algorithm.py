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
right ones, and stores both transposed, ``(rank, length)``: products with a matrix are then several times faster on a
CPU.

[Note: the residual of a rank]

Each rank keeps the error of its *own* coefficients: M minus basis times own coefficients. Coefficients are linear in M,
so with ``divisor * output`` the residuals add up over ranks to the sum of all inputs, whatever the divisor is, and no
rank's residual can grow because of the others: it is at most its own M without the part in the basis. A rank that has
joined continues with a gradient of zero, until its residual is delivered.

With a wire, or in half precision, its own coefficients are those that arrive: its factors less its rounding errors, in
its messages and in the sum of the values that it owns. So these errors stay in the residual, which is in ``float32`` at
least, and are delivered later. Rounding errors in a factor that becomes the basis are not lost gradients: any basis
will do, as long as all ranks have the same.

[Note: layout of factors]

Matrices of one shape are a batch and are multiplied by one kernel. All left factors of a bucket are stored in one flat
tensor and all right ones in another, sorted so that a batch and all factors of one rank and length are each one view
``(count, rank, length)`` of it, and the flat tensor is sent as it is. A group of factors is orthonormalized at once: on
a CPU those of one rank and length; on accelerators, where launching kernels takes longest, all of one rank, the shorter
ones filled up with zeros, which change neither products nor lengths. A layout follows from shapes and options alone, so
it is the same on every rank.

[Note: where the gradient plus its residual is computed]

M is computed in the gradient's own memory: the bucket is overwritten by the output in the end anyway, and the residual
stays as it was until the step is made. So one matrix in the bucket's own precision takes no workspace.
For several of one shape, or half precision, which is computed in ``float32``, a copy is made for each product and
dropped before the stage waits for a collective: workspace never exceeds the bucket that is being compressed.

[Note: matrices that are not finite]

A non-finite element of M makes a row of its products non-finite, on the rank that has it and so in their mean. The last
factor to be averaged says which matrices are finite: it is the same on all ranks, and so is the answer. A first one
only has to become a basis, and any will do: its non-finite elements are zeroed, or a spare basis takes its place. Such
a matrix comes out as NaN, and the memory drops the values that the whole pass has put into it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from overlap._torch.device import has_streams, hold
from overlap._torch.foreach import add_all, all_finite, copy_all, norms
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import all_reduce
from overlap.hooks.powersgd.memory import Memory, Side
from overlap.hooks.wires import Wire

# On a CPU, copying larger matrices together takes longer than one more kernel.
_CPU_BATCH_NUMEL = 16 * 1024
_CPU_BLOCK_ROWS = 32


class PowerIteration:
    """The compressed reduction of one bucket, whose gradients become the output, in one step.

    ``memory`` has residuals and factors of the step before by ``keys``, and gets those of this one. A step that starts
    from new directions has a number, ``cold_step``.
    """

    def __init__(
        self,
        bucket: Bucket,
        layout: ReductionLayout,
        keys: Sequence[str],
        memory: Memory,
        *,
        error_feedback: bool,
        wire: Wire | None,
        seed: int,
        cold_step: int | None,
    ) -> None:
        self.bucket = bucket
        self.layout = layout
        places = [place for batch in layout.batches for place in batch.places]
        self.keys = [keys[place] for place in places]
        """Of the matrices, in the order of batches."""
        self.memory = memory
        self.wire = wire
        self.seed = seed
        self.cold_step = cold_step
        self.dtype = torch.promote_types(bucket.buffer.dtype, torch.float32)
        """To compute in, and of residuals."""
        self.sent_numel = 0
        """Elements sent so far, in the bucket's dtype."""
        self.error_feedback = error_feedback
        gradients, residuals = bucket.gradients, dict[int, Tensor]()
        if error_feedback:
            for place, key in zip(places, self.keys, strict=True):
                if (residual := memory.residual(key, gradients[place], self.dtype)) is not None:
                    residuals[place] = residual
            if bucket.buffer.dtype == self.dtype:
                add_all([gradients[place] for place in residuals], list(residuals.values()))
                residuals = {}
        self.matrices = [Matrices(batch, gradients, residuals, self.dtype) for batch in layout.batches]

    async def both_factors(self) -> None:
        """PowerSGD: two all-reduces, of P and of Q."""
        own_p = self._times(self._start(self.layout.right))  # P = M Q
        p = self._orthonormalize(await self._mean(own_p, with_exact=True))
        own_q = self._times(p)  # Q = M^T P
        q = await self._mean(own_q)
        self._decompress((p, own_q), (p, self._marked(q)), last=q)  # output = P Q^T

    async def one_factor(self, *, is_left: bool) -> None:
        """ACP-SGD: one all-reduce, of P or in every other step of Q; the basis is the other of the step before."""
        basis = self._orthonormalize(self._start(self.layout.right if is_left else self.layout.left))
        own = self._times(basis)  # P = M Q or Q = M^T P
        mean = await self._mean(own, with_exact=True)
        marked = self._marked(mean)
        owns, means = ((own, basis), (marked, basis)) if is_left else ((basis, own), (basis, marked))
        self._decompress(owns, means, last=mean)  # output = P Q^T

    def _start(self, layout: FactorLayout) -> Factors:
        """The factors of the step before; random directions where there are none, or of another shape."""
        factors = self._empty(layout)
        side: Side = "left" if layout.is_left else "right"
        targets, sources = [], []
        for key, factor in zip(self.keys, factors.each(), strict=True):
            found = self.memory.get(key, side) if self.cold_step is None else None
            if found is not None and found.shape == factor.shape:
                sources.append(hold(found))
                targets.append(factor)
            else:
                factor.copy_(self._random(*factor.shape, step=self.cold_step) * factor.size(1) ** -0.5)
        copy_all(targets, sources)
        return factors

    def _normalized(self, rows: Tensor, group: _Group) -> Tensor:
        """All directions with length 1; drawn anew if they are zero, rounding errors or not finite.

        Products with such directions stay in the range of the gradient, in half precision too. A direction vanishes
        when the gradient had a smaller rank than the factor; a random one can find a direction of a later gradient.
        """
        lengths = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        is_there = lengths > 8 * torch.finfo(self.dtype).eps * lengths.amax(dim=1, keepdim=True)
        if not has_streams(rows.device) and bool(is_there.all()):
            return torch.div(rows, lengths)
        return torch.where(is_there, rows / lengths, self._spare(group))

    def _times(self, basis: Factors) -> Factors:
        """P = M Q of this rank's matrices and the right factors ``basis``, or Q = M^T P of the left ones."""
        is_left = basis.layout.is_left
        product = self._empty(self.layout.right if is_left else self.layout.left)
        for matrices, factors, out in zip(self.matrices, basis.of_batches, product.of_batches, strict=True):
            loaded = matrices.load()
            torch.bmm(factors, loaded if is_left else loaded.mT, out=out)
        return product

    def _decompress(self, own: tuple[Factors, Factors], mean: tuple[Factors, Factors], *, last: Factors) -> None:
        """Output = P Q^T of the mean factors; residual = M - P Q^T of this rank's own. Residuals and the ``last`` mean
        factors are put into the memory, as one tensor: so a step that is not made takes one kernel for all."""
        numels = [one.numel for one in self.matrices] if self.error_feedback else []
        factors_numel = last.flat.numel() if self.cold_step is None else 0
        kept = torch.empty(sum(numels) + factors_numel, dtype=self.dtype, device=self.bucket.buffer.device)
        *outs, of_factors = kept.split_with_sizes([*numels, factors_numel])
        of_batches = zip(
            self.matrices,
            zip(own[0].of_batches, own[1].of_batches, strict=True),
            zip(mean[0].of_batches, mean[1].of_batches, strict=True),
            outs if numels else itertools.repeat(None),
            strict=False,
        )
        errors: list[Tensor] = []
        for matrices, of_own, of_mean, out in of_batches:
            errors += matrices.decompress(of_own, of_mean, out)
        if errors:
            self.memory.put(self.keys, errors)
        if self.cold_step is None:
            side: Side = "left" if last.layout.is_left else "right"
            changed = self._change(last, self._normalized, of_factors)
            self.memory.put_factors(self.keys, side, changed.each())

    async def _mean(self, factors: Factors, *, with_exact: bool = False) -> Factors:
        """The mean of factors over ranks; ``factors`` become this rank's part in it, times the divisor.

        ``with_exact``: the uncompressed gradients are reduced, too, in the same all-reduce unless factors have a wire.
        """
        exact = [self.bucket.gradients[place] for place in self.layout.exact] if with_exact else []
        scale = 1.0
        if self.bucket.buffer.dtype == torch.float16:
            # It holds no more than 65504. An element is a product with a direction of length 1, so it is larger than
            # all of the matrix by at most the root of the direction's length. Powers of two round nothing.
            summed = max([batch.cols if factors.layout.is_left else batch.rows for batch in self.layout.batches])
            scale = 2.0 ** -math.ceil(math.log2(summed) / 2)
            factors.flat.mul_(scale)
        if self.wire is None:
            flat = await self._all_reduce(factors.flat, exact)
        else:
            await self._all_reduce(factors.flat[:0], exact)
            flat = await self._sum_by_wire(factors.flat)
        if scale < 1:
            factors.flat.div_(scale)
            flat = flat / scale
        return Factors(factors.layout, flat)

    async def _all_reduce(self, flat: Tensor, exact: Sequence[Tensor]) -> Tensor:
        """The mean of factors, and that of gradients, in place, by one all-reduce in the bucket's dtype."""
        numel, dtype, divisor = flat.numel(), self.bucket.buffer.dtype, self.bucket.divisor
        if exact:
            sent = torch.cat([flat, *(gradient.reshape(-1) for gradient in exact)]).mul_(1 / divisor).to(dtype)
        else:
            sent = flat.mul(1 / divisor).to(dtype)
        if sent.numel() == 0:
            return flat
        if dtype != self.dtype:
            # Rounding errors of the bucket's dtype are not sent, so they have to stay in the residual.
            flat.copy_(sent[:numel]).mul_(divisor)
        await all_reduce(sent, group=self.bucket.group)
        self.sent_numel += sent.numel()
        if exact and not has_streams(sent.device):
            self.memory.note_finite(all_finite(sent[numel:]))
        parts = sent[numel:].split([gradient.numel() for gradient in exact])
        copy_all(exact, [part.view_as(gradient) for part, gradient in zip(parts, exact, strict=True)])
        return sent[:numel].to(self.dtype)

    async def _sum_by_wire(self, flat: Tensor) -> Tensor:
        """The mean of factors by messages of the wire, the same on every rank bit for bit."""
        bucket, group = self.bucket, self.bucket.group
        quantized_sum = self.memory.sum_of(flat.numel(), group, flat.device)
        values = flat.mul(1 / bucket.divisor).float()
        errors, mean = values.clone(), torch.empty_like(values)
        await quantized_sum(errors, out=mean)
        flat.copy_(values.sub_(errors)).mul_(bucket.divisor)
        sent_bytes = group.size() * quantized_sum.codec.message_bytes
        self.sent_numel += math.ceil(sent_bytes / bucket.buffer.dtype.itemsize) if group.size() > 1 else flat.numel()
        return mean.to(self.dtype)

    def _marked(self, mean: Factors) -> Factors:
        """The mean factors with NaN in place of matrices that are not finite on all ranks, which so come out as NaN;
        see [Note: matrices that are not finite]."""
        factors = mean.each()
        if has_streams(mean.flat.device):
            exact = [self.bucket.gradients[place].to(self.dtype) for place in self.layout.exact]
            are_finite = torch.stack(norms([*factors, *exact], math.inf)) < math.inf
            self.memory.note_finite(are_finite)
            are_finite = are_finite[: len(factors)]
        else:
            self.memory.note_finite(are_all := all_finite(mean.flat))
            if are_all:
                return mean
            are_finite = torch.stack(norms(factors, math.inf)) < math.inf
        return Factors(mean.layout, torch.where(are_finite[mean.layout.owners], mean.flat, mean.layout.nan))

    def _orthonormalize(self, factors: Factors) -> Factors:
        """Orthonormal bases of the factors' spans, any where they are not finite.

        On a CPU Householder's QR is the fastest at every shape that matters. Accelerators run it one matrix after
        another, so there it serves ``float64`` alone, which Cholesky-QR cannot do in a wider dtype.
        """
        if has_streams(factors.flat.device) and self.dtype != torch.float64:
            return self._change(factors, lambda rows, group: cholesky_qr(rows, self._spare(group)))
        return self._change(factors, lambda rows, group: householder_qr(rows.nan_to_num(0.0, 0.0, 0.0)))

    def _change(
        self, factors: Factors, change: Callable[[Tensor, _Group], Tensor], out: Tensor | None = None
    ) -> Factors:
        """The factors with those of each group as ``change(rows, group)`` of ``rows``, shape ``(count, rank, length)``,
        in ``out``, which is flat, or else a new tensor."""
        made = self._empty(factors.layout) if out is None else Factors(factors.layout, out)
        for group in factors.layout.groups:
            given, alike = factors.views(group), made.views(group)
            if len(alike) == 1:
                alike[0].copy_(change(given[0], group))
                continue
            # On an accelerator. In the dtype that Cholesky-QR computes in.
            rows = self._kept("rows", group, torch.float64)
            copy_all(_beginnings(rows, group), given)
            copy_all(alike, _beginnings(change(rows, group), group))
        return made

    def _spare(self, group: _Group) -> Tensor:
        """Random orthonormal directions for all factors of a group, the same in all steps."""
        return self._kept("spare", group, self.dtype)

    def _kept(self, name: Literal["rows", "spare"], group: _Group, dtype: torch.dtype) -> Tensor:
        """Zeros with room for all factors of a group, or its spare directions, made once for all steps."""
        kept, device = self.memory.kept, self.bucket.buffer.device
        if (found := kept.get((name, group, dtype, device))) is None:
            _, (_, rank, longest) = group[-1]
            count = sum([shape[0] for _, shape in group])
            found = kept[name, group, dtype, device] = torch.zeros(count, rank, longest, dtype=dtype, device=device)
            for part in _beginnings(found, group) if name == "spare" else ():
                part.copy_(householder_qr(self._random(*part.shape[1:])))
        return hold(found)

    def _random(self, rank: int, length: int, *, step: int | None = None) -> Tensor:
        """Random directions ``(rank, length)``: of one ``step``, or the same in all steps."""
        device = self.bucket.buffer.device
        return random_directions(rank, length, seed=self.seed, step=step, dtype=self.dtype, device=device)

    def _empty(self, layout: FactorLayout) -> Factors:
        return Factors(layout, torch.empty(layout.owners.numel(), dtype=self.dtype, device=self.bucket.buffer.device))


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


# An orthonormal basis of the span of each batch of rows, ``(count, rank, length)``, finite and at most ``length`` of
# them. It is always a whole basis: where rows are zero or depend on each other, arbitrary directions are added, so a
# zero gradient needs no guard. No value is read on the host.


def householder_qr(rows: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(rows.mT)[0].mT
    return basis


def cholesky_qr(rows: Tensor, spare: Tensor) -> Tensor:
    """By two rounds of Cholesky-QR in ``float64``: products and small triangles, which accelerators like.

    Rounding has made the rows uncertain by their dtype's epsilon, so a few times that is added to them in random
    directions, orthonormal ones. That bounds the condition number (but for the rows' lengths, which do not matter to a
    Cholesky factorization), so the Gram matrix of dependent rows can be factorized, too. Should it fail even so, the
    random directions are the basis; error feedback makes up for it.
    """
    wide = rows.double()
    lengths = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp_(
        min=1e-100
    )  # Far below float32's range; its square is in float64's.
    basis = torch.addcmul(wide, spare, lengths, value=16 * torch.finfo(torch.float32).eps)
    for _ in range(2):
        # cholesky_ex and not cholesky, which reads on the host whether it succeeded.
        lower, _ = torch.linalg.cholesky_ex(basis @ basis.mT)
        basis = torch.linalg.solve_triangular(lower, basis, upper=False)
    is_whole = torch.linalg.vector_norm(basis, dim=(1, 2), keepdim=True) < math.inf
    return torch.where(is_whole, basis, spare).to(rows.dtype)


# Which gradients of a bucket are compressed, and where their factors are. See [Note: layout of factors].


class Batch(NamedTuple):
    """Matrices of one shape and the rank of their factors."""

    places: tuple[int, ...]
    """Of their gradients in the bucket."""
    rows: int
    cols: int
    rank: int


_View = tuple[int, tuple[int, int, int]]
_Group = tuple[_View, ...]


@dataclass(frozen=True, eq=False)
class FactorLayout:
    """Where the left or all right factors of a bucket are in their flat tensor: offsets and shapes of views."""

    is_left: bool
    of_batches: tuple[_View, ...]
    """Of each batch of matrices."""
    groups: tuple[_Group, ...]
    """Of the factors that are orthonormalized at once, by length."""
    owners: Tensor
    """The number of the matrix that each element belongs to, in the order of batches."""
    nan: Tensor
    """0-dimensional, on their device."""

    @classmethod
    def of(cls, batches: Sequence[Batch], *, is_left: bool, device: torch.device) -> FactorLayout:
        """The left or the right factors of ``batches``."""
        shapes = [(len(batch.places), batch.rank, batch.rows if is_left else batch.cols) for batch in batches]
        firsts = [0, *itertools.accumulate(count for count, _, _ in shapes)]
        of_batches: dict[int, _View] = {}
        alike: list[_View] = []
        owners = [torch.empty(0, dtype=torch.int64, device=device)]
        end = 0
        by_length = sorted(range(len(shapes)), key=lambda index: shapes[index][1:])
        for (rank, length), indices in itertools.groupby(by_length, key=lambda index: shapes[index][1:]):
            start = end
            for index in indices:
                of_batches[index] = (end, shapes[index])
                end += math.prod(shapes[index])
                numbers = torch.arange(firsts[index], firsts[index + 1], device=device)
                owners.append(numbers.repeat_interleave(rank * length))
            alike.append((start, ((end - start) // (rank * length), rank, length)))
        together = itertools.groupby(alike, key=lambda view: view[1][1] if has_streams(device) else view)
        return cls(
            is_left=is_left,
            of_batches=tuple(of_batches[index] for index in range(len(shapes))),
            groups=tuple(tuple(views) for _, views in together),
            owners=torch.cat(owners),
            nan=torch.full((), math.nan, device=device),
        )


class Factors:
    """All left or all right factors of a bucket, views of ``flat``."""

    def __init__(self, layout: FactorLayout, flat: Tensor) -> None:
        self.layout = layout
        self.flat = flat
        self.of_batches = self.views(layout.of_batches)
        """Of each batch of matrices, ``(count, rank, length)``."""

    def each(self) -> list[Tensor]:
        """The factors of each matrix, ``(rank, length)``, in the order of batches."""
        return [factor for of_batch in self.of_batches for factor in of_batch.unbind()]

    def views(self, views: Sequence[_View]) -> list[Tensor]:
        start = self.flat.storage_offset()
        return [
            self.flat.as_strided((count, rank, length), (rank * length, length, 1), start + offset)
            for offset, (count, rank, length) in views
        ]


def _beginnings(rows: Tensor, group: _Group) -> list[Tensor]:
    """The part of ``rows``, which have room for all factors of ``group``, that each of its views fills."""
    parts = rows.split_with_sizes([count for _, (count, _, _) in group])
    return [part[..., :length] for part, (_, (_, _, length)) in zip(parts, group, strict=True)]


@dataclass(frozen=True)
class ReductionLayout:
    """How each gradient of a bucket is reduced."""

    batches: tuple[Batch, ...]
    left: FactorLayout
    right: FactorLayout
    exact: tuple[int, ...]
    """Places of the gradients that are reduced as they are."""


def layout_of(
    shapes: Sequence[Sequence[int]], *, rank: int, min_compression_rate: float, device: torch.device
) -> ReductionLayout:
    """The layout of a bucket of gradients of ``shapes``; as a matrix, a gradient has its first dimension as rows.

    A gradient is compressed if its factors have fewer than ``1 / min_compression_rate`` of its elements.
    """
    batch_numel = math.inf if has_streams(device) else _CPU_BATCH_NUMEL
    alike: dict[tuple[int, int, int], list[int]] = {}
    exact = []
    for place, shape in enumerate(shapes):
        rows, cols = math.prod(shape[:1]), math.prod(shape[1:])
        if len(shape) > 1 and (rows + cols) * rank * min_compression_rate < rows * cols:
            alone = place if rows * cols > batch_numel else -1
            alike.setdefault((rows, cols, alone), []).append(place)
        else:
            exact.append(place)
    batches = [
        Batch(tuple(places), rows, cols, min(rank, rows, cols)) for (rows, cols, _), places in sorted(alike.items())
    ]
    return ReductionLayout(
        batches=tuple(batches),
        left=FactorLayout.of(batches, is_left=True, device=device),
        right=FactorLayout.of(batches, is_left=False, device=device),
        exact=tuple(exact),
    )


class Matrices:
    """The matrices M = gradient + residual of one batch.

    In memory formats such as channels-last the columns of a matrix are in another order than in the gradient's shape,
    which is the same on all ranks and changes no product. ``residuals``, by place, are those that are not added yet, of
    ``dtype``, in which this computes.
    """

    def __init__(
        self, batch: Batch, gradients: Sequence[Tensor], residuals: Mapping[int, Tensor], dtype: torch.dtype
    ) -> None:
        def as_matrix(tensor: Tensor) -> Tensor:
            return tensor if tensor.ndim == 2 else tensor.as_strided((batch.rows, batch.cols), (batch.cols, 1))

        self._given = [gradients[place] for place in batch.places]
        self._gradients = list(map(as_matrix, self._given))
        self._residuals = {row: as_matrix(residuals[p]) for row, p in enumerate(batch.places) if p in residuals}
        self._dtype = dtype
        self._is_in_place = self._gradients[0].dtype == dtype
        self._is_alone = self._is_in_place and len(self._gradients) == 1

    def load(self) -> Tensor:
        """M, ``(count, rows, cols)``: a copy, unless one matrix is alone."""
        if self._is_alone:
            return self._gradients[0][None]
        matrices = torch.stack(self._gradients).to(self._dtype)
        add_all([matrices[row] for row in self._residuals], list(self._residuals.values()))
        return matrices

    @property
    def numel(self) -> int:
        """Elements of all."""
        return sum([gradient.numel() for gradient in self._gradients])

    def decompress(
        self, own: tuple[Tensor, Tensor], mean: tuple[Tensor, Tensor], out: Tensor | None
    ) -> Sequence[Tensor]:
        """Write P Q^T of the ``mean`` factors to the gradients; returns M - P Q^T of this rank's ``own`` factors,
        shaped as the gradients, in ``out``, which is flat; nothing where that is ``None``."""
        matrices = self.load()
        errors = None if out is None else out.view(matrices.shape)
        if errors is not None and self._is_alone and not has_streams(matrices.device):
            # A block of rows stays in the CPU's cache between the two products.
            parts = (matrices[0], errors[0], own[0][0].t(), mean[0][0].t())
            for matrix, error, own_p, mean_p in zip(*(part.split(_CPU_BLOCK_ROWS) for part in parts), strict=True):
                torch.addmm(matrix, own_p, own[1][0], alpha=-1, out=error)
                torch.mm(mean_p, mean[1][0], out=matrix)
        else:
            if errors is not None:
                torch.baddbmm(matrices, own[0].mT, own[1], alpha=-1, out=errors)
            torch.bmm(mean[0].mT, mean[1], out=matrices)
            if not self._is_alone:
                copy_all(self._gradients, matrices.unbind())
        # As matrices, whose columns are in the order of the gradient's memory, they were made of it.
        return [
            error if gradient.ndim == 2 else error.as_strided(gradient.size(), gradient.stride())
            for error, gradient in zip(
                () if errors is None else errors.unbind(), self._given, strict=errors is not None
            )
        ]
