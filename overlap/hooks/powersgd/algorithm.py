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

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from overlap._torch.device import Workspace, has_streams, hold, hold_all
from overlap._torch.foreach import add_all, all_finite, copy_all, largest
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Operation, all_reduce
from overlap.hooks.powersgd.memory import Memory, Side
from overlap.hooks.segments import round_up
from overlap.hooks.wires import Wire

# On a CPU, copying larger matrices together takes longer than one more kernel.
_CPU_BATCH_NUMEL = 16 * 1024
_CPU_BLOCK_ROWS = 32


class PowerIteration:
    """The compressed reduction of one bucket, whose gradients become the output, step after step.

    ``memory`` has residuals and factors of the step before by ``keys``, and gets those of this one. ``is_left``: the
    factors that are computed; both where it is ``None``. A step that starts from new directions has a number,
    ``cold_step``.
    """

    def __init__(
        self,
        bucket: Bucket,
        layout: ReductionLayout,
        keys: Sequence[str],
        memory: Memory,
        *,
        is_left: bool | None,
        error_feedback: bool,
        wire: Wire | None,
        seed: int,
        cold_step: int | None,
    ) -> None:
        self.bucket = bucket
        self.layout = layout
        self.is_left = is_left
        gradients, places = bucket.gradients, [place for batch in layout.batches for place in batch.places]
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
        self.matrices = [Matrices(batch, gradients, self.dtype) for batch in layout.batches]
        self.compressed = [gradients[place] for place in places]
        self.exact = [gradients[place] for place in layout.exact]
        self._workspace = Workspace()
        self._narrow: Tensor | None = None
        """The values that are being sent, in half precision."""
        # By group: batches and directions that all steps share, as views for this bucket.
        self._rows: dict[_Group, tuple[Tensor, list[Tensor]]] = {}
        self._spares: dict[_Group, Tensor] = {}

    def plan(self) -> list[Callable[[], Any]]:
        """The code between collectives, in its order: functions that return the next awaitable.

        That is an operation, so that they are a stage's plan; with a wire a coroutine, so that they are not.
        """
        if self.is_left is None:
            return [self._left, self._right, self._both]
        return [self._one, self._output]

    # PowerSGD: two all-reduces, of P and of Q.

    def _left(self) -> Any:
        self._begin()
        self._times(self.start, self.sent)  # P = M Q
        return self._send(self.sent, self.sent)

    def _right(self) -> Any:
        self._receive(self.sent, self.sent)
        self._orthogonalize(self.sent)
        self._times(self.sent, self.start)  # Q = M^T P
        return self._send(self.start, self.other)

    def _both(self) -> None:
        self._receive(self.start, self.other)
        self._decompress((self.sent, self.start), (self.sent, self.other), last=self.other)  # output = P Q^T

    # ACP-SGD: one all-reduce, of P or in every other step of Q; the basis is the other of the step before.

    def _one(self) -> Any:
        self._begin()
        self._orthogonalize(self.start)
        self._times(self.start, self.other)  # P = M Q or Q = M^T P
        return self._send(self.other, self.sent)

    def _output(self) -> None:
        self._receive(self.other, self.sent)
        own, mean = (self.other, self.start), (self.sent, self.start)
        if not self.is_left:
            own, mean = own[::-1], mean[::-1]
        self._decompress(own, mean, last=self.sent)  # output = P Q^T

    def _begin(self) -> None:
        """Compute M = gradient + residual; get the factors to start from, and gradients that are sent uncompressed."""
        if not self._workspace.take():
            self._make_workspace()
        if self.error_feedback:
            self._add(self.memory.residuals(self.keys, self.compressed, self.dtype))
        # The factors of the step before; random directions where there are none, or of another shape.
        side: Side = "left" if self.start.layout.is_left else "right"
        targets, sources = [], []
        for key, factor in zip(self.keys, self.start.each, strict=True):
            found = self.memory.get(key, side) if self.cold_step is None else None
            if found is not None and found.shape == factor.shape:
                sources.append(found)
                targets.append(factor)
            else:
                factor.copy_(self._random(*factor.shape, step=self.cold_step) * factor.size(1) ** -0.5)
        hold_all(sources)
        if self.bucket.buffer.dtype == self.dtype:
            copy_all([*targets, *self.parts], [*sources, *self.exact])
        else:  # One kernel copies all tensors from one dtype.
            copy_all(targets, sources)
            copy_all(self.parts, self.exact)

    def _make_workspace(self) -> None:
        left, right = self.layout.left, self.layout.right
        sent, start = (right, left) if self.is_left is False else (left, right)
        other = start if self.is_left is None else sent
        exact = [gradient.numel() for gradient in self.exact]
        numels = [start.numel, sum([sent.numel, *exact]), other.numel]
        # Each begins where a tensor of its own would, so that products are the same in every bit.
        ends = list(itertools.accumulate(map(round_up, numels)))
        flat = self._workspace.make(ends[-1], dtype=self.dtype, device=self.bucket.buffer.device)
        first, second, third = (flat[end - round_up(numel) :][:numel] for end, numel in zip(ends, numels, strict=True))
        self.start = Factors(start, first)
        """The factors to start from; then, where both are computed, this rank's own."""
        head, *tail = second.split_with_sizes([sent.numel, *exact])
        self.sent = Factors(sent, head, whole=second)
        """Those that are sent with the uncompressed gradients, whose ``parts`` are behind them."""
        self.parts = [part.view(gradient.shape) for part, gradient in zip(tail, self.exact, strict=True)]
        self.other = Factors(other, third)
        """The mean of those that ``start`` holds in the end; or, where one is computed, this rank's own."""

    def _add(self, residuals: Sequence[Tensor | None]) -> None:
        if self.bucket.buffer.dtype == self.dtype:
            pairs = [pair for pair in zip(self.compressed, residuals, strict=True) if pair[1] is not None]
            add_all([gradient for gradient, _ in pairs], [residual for _, residual in pairs if residual is not None])
            return
        of_all = iter(residuals)
        for matrices in self.matrices:
            matrices.residuals = list(itertools.islice(of_all, len(matrices.gradients)))

    def _times(self, basis: Factors, product: Factors) -> None:
        """P = M Q of this rank's matrices and the right factors ``basis``, or Q = M^T P of the left ones."""
        for matrices, factors, out in zip(self.matrices, basis.of_batches, product.of_batches, strict=True):
            loaded = matrices.load()
            torch.bmm(factors, loaded if basis.layout.is_left else loaded.mT, out=out)

    def _send(self, own: Factors, mean: Factors) -> Any:
        """Make ``mean`` the mean over ranks of the factors ``own``, which become this rank's part in it, times the
        divisor, unless they are the same. The uncompressed gradients are reduced with ``sent``, in the same all-reduce
        unless factors have a wire."""
        divisor, dtype = self.bucket.divisor, self.bucket.buffer.dtype
        if (scale := self._scale_of(own)) < 1:
            own.flat.mul_(scale)
        if self.wire is not None:
            return self._send_by_wire(own, mean)
        sent = mean.whole
        if own is not mean and sent is mean.flat:
            torch.mul(own.flat, 1 / divisor, out=sent)
        else:
            if own is not mean:
                mean.flat.copy_(own.flat)
            sent.mul_(1 / divisor)
        if dtype != self.dtype:
            sent = self._narrow = sent.to(dtype)
            if own is not mean:
                # Rounding errors of the bucket's dtype are not sent, so they have to stay in the residual.
                own.flat.copy_(sent[: own.flat.numel()]).mul_(divisor)
        self.sent_numel += sent.numel()
        if sent is not mean.whole:
            return all_reduce(sent, group=self.bucket.group)
        if mean.reduction is None:
            mean.reduction = all_reduce(sent, group=self.bucket.group)
        return mean.reduction

    async def _send_by_wire(self, own: Factors, mean: Factors) -> None:
        """As :meth:`_send`, by messages of the wire: the mean is the same on every rank bit for bit."""
        bucket, group, numel = self.bucket, self.bucket.group, own.flat.numel()
        if (exact := mean.whole[numel:]).numel():
            sent = exact.mul_(1 / bucket.divisor).to(bucket.buffer.dtype)
            await all_reduce(sent, group=group)
            exact.copy_(sent)
            self.sent_numel += sent.numel()
        quantized_sum = self.memory.sum_of(numel, group, own.flat.device)
        values = own.flat.mul(1 / bucket.divisor).float()
        errors, total = values.clone(), torch.empty_like(values)
        await quantized_sum(errors, out=total)
        own.flat.copy_(values.sub_(errors)).mul_(bucket.divisor)
        mean.flat.copy_(total)
        sent_bytes = group.size() * quantized_sum.codec.message_bytes
        self.sent_numel += math.ceil(sent_bytes / bucket.buffer.dtype.itemsize) if group.size() > 1 else numel

    def _receive(self, own: Factors, mean: Factors) -> None:
        """What :meth:`_send` has sent is there."""
        if self._narrow is not None:
            mean.whole.copy_(self._narrow)
            self._narrow = None
        if (scale := self._scale_of(own)) < 1:
            for factors in {own, mean}:
                factors.flat.div_(scale)
        if mean is self.sent and self.exact:
            self.memory.note_largest(largest(mean.whole[mean.flat.numel() :]))
            copy_all(self.exact, self.parts)

    def _scale_of(self, factors: Factors) -> float:
        """The factor by which values in half precision are multiplied before they are sent."""
        if self.bucket.buffer.dtype != torch.float16:
            return 1.0
        # It holds no more than 65504. An element is a product with a direction of length 1, so it is larger than all of
        # the matrix by at most the root of the direction's length. Powers of two round nothing.
        summed = max([batch.cols if factors.layout.is_left else batch.rows for batch in self.layout.batches])
        return 2.0 ** -math.ceil(math.log2(summed) / 2)

    def _orthogonalize(self, factors: Factors) -> None:
        """Orthonormal bases of the factors' spans in place of the factors, any where these are not finite.

        On a CPU Householder's QR is the fastest at every shape that matters. Accelerators run it one matrix after
        another, so there it serves ``float64`` alone, which Cholesky-QR cannot do in a wider dtype.
        """
        is_cholesky = has_streams(factors.flat.device) and self.dtype != torch.float64
        for group, views in zip(factors.layout.groups, factors.of_groups, strict=True):
            rows, parts = self._loaded(group, views)
            if is_cholesky and parts is not views:
                cholesky_qr(rows, self._spare(group), out=rows)
            elif is_cholesky:
                rows.copy_(cholesky_qr(rows, self._spare(group)))
            else:
                rows.copy_(householder_qr(rows.nan_to_num(0.0, 0.0, 0.0)))
            if parts is not views:
                copy_all(views, parts)

    def _decompress(self, own: tuple[Factors, Factors], mean: tuple[Factors, Factors], *, last: Factors) -> None:
        """Output = P Q^T of the mean factors; residual = M - P Q^T of this rank's own. Residuals and the ``last`` mean
        factors are put into the memory, as one tensor: so a step that is not made takes one kernel for all."""
        numels = [matrices.numel for matrices in self.matrices] if self.error_feedback else []
        numel = last.layout.numel if self.cold_step is None else 0
        kept = torch.empty(sum(numels) + numel, dtype=self.dtype, device=self.bucket.buffer.device)
        *outs, flat = kept.split_with_sizes([*numels, numel])
        directions = Factors(last.layout, flat) if self.cold_step is None else None
        self._settle(last, directions)
        errors: list[Tensor] = []
        for place, matrices in enumerate(self.matrices):
            of_own, of_mean = ((left.of_batches[place], right.of_batches[place]) for left, right in (own, mean))
            errors += matrices.decompress(of_own, of_mean, outs[place] if numels else None)
        if errors:
            self.memory.put(self.keys, errors)
        if directions is not None:
            self.memory.put_factors(self.keys, "left" if last.layout.is_left else "right", directions.each)
        self._workspace.give_back()
        self.memory.count(self.bucket.buffer.numel(), self.sent_numel)
        self.sent_numel = 0

    def _settle(self, last: Factors, directions: Factors | None) -> None:
        """Write the ``last`` mean factors to ``directions``, if any, all with length 1; and replace those of matrices
        that are not finite on all ranks by NaN, as which such a matrix so comes out. See [Note: matrices that are not
        finite].

        A direction is drawn anew if it is zero, a rounding error or not finite. Products with such directions stay in
        the range of the gradient, in half precision too. One vanishes when the gradient had a smaller rank than the
        factor; a random one can find a direction of a later gradient.
        """
        is_on_host = not has_streams(last.flat.device)
        new = directions.of_groups if directions is not None else [[]] * len(last.of_groups)
        for group, views, targets in zip(last.layout.groups, last.of_groups, new, strict=True):
            rows, parts = self._loaded(group, views)
            lengths = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
            longest = lengths.amax(dim=1, keepdim=True)
            if not is_on_host:
                # Values of ``float32`` have finite lengths in ``float64``.
                is_wide = rows.dtype != self.dtype
                most = longest if is_wide else torch.linalg.vector_norm(rows, math.inf, dim=(1, 2), keepdim=True)
                self.memory.note_largest(most)
                marked = torch.sub(rows, most, alpha=0)  # The rows in every bit, or NaN.
            if targets:
                is_there = lengths > 8 * torch.finfo(self.dtype).eps * longest
                out = targets[0] if parts is views else rows
                if is_on_host and bool(is_there.all()):
                    torch.div(rows, lengths, out=out)
                else:
                    torch.where(is_there, rows / lengths, self._spare(group), out=out)
            if is_on_host:
                continue
            if parts is views:
                rows.copy_(marked)
            else:
                copy_all([*views, *targets], [*_beginnings(marked, group), *(parts if targets else ())])
        if is_on_host:
            self.memory.note_largest(most := largest(last.flat))
            for factor in () if most < math.inf else last.each:
                factor.masked_fill_(~all_finite(factor), math.nan)

    def _loaded(self, group: _Group, views: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """The factors of a group as one batch, and the part of it that each of ``views`` fills: one view is the batch
        itself. On an accelerator there are several, and then it is in the dtype that Cholesky-QR computes in."""
        if len(views) == 1:
            return views[0], views
        if (found := self._rows.get(group)) is None:
            rows = self._shared("rows", group, torch.float64)
            found = self._rows[group] = rows, _beginnings(rows, group)
        copy_all(found[1], views)
        return found

    def _spare(self, group: _Group) -> Tensor:
        """Random orthonormal directions for all factors of a group, the same in all steps."""
        if (found := self._spares.get(group)) is None:
            found = self._spares[group] = self._shared("spare", group, self.dtype)
        return found

    def _shared(self, name: Literal["rows", "spare"], group: _Group, dtype: torch.dtype) -> Tensor:
        """Zeros with room for all factors of a group, or its spare directions, made once for all steps and buckets."""
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


def cholesky_qr(rows: Tensor, spare: Tensor, *, out: Tensor | None = None) -> Tensor:
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
    return torch.where(is_whole, basis, spare, out=out).to(rows.dtype)


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
    numel: int
    """Elements of all."""

    @classmethod
    def of(cls, batches: Sequence[Batch], *, is_left: bool, device: torch.device) -> FactorLayout:
        """The left or the right factors of ``batches``."""
        shapes = [(len(batch.places), batch.rank, batch.rows if is_left else batch.cols) for batch in batches]
        of_batches: dict[int, _View] = {}
        alike: list[_View] = []
        end = 0
        by_length = sorted(range(len(shapes)), key=lambda index: shapes[index][1:])
        for (rank, length), indices in itertools.groupby(by_length, key=lambda index: shapes[index][1:]):
            start = end
            for index in indices:
                of_batches[index] = (end, shapes[index])
                end += math.prod(shapes[index])
            alike.append((start, ((end - start) // (rank * length), rank, length)))
        together = itertools.groupby(alike, key=lambda view: view[1][1] if has_streams(device) else view)
        return cls(
            is_left=is_left,
            of_batches=tuple(of_batches[index] for index in range(len(shapes))),
            groups=tuple(tuple(views) for _, views in together),
            numel=end,
        )


class Factors:
    """All left or all right factors of a bucket, views of ``flat``; which may be the beginning of a ``whole``."""

    def __init__(self, layout: FactorLayout, flat: Tensor, *, whole: Tensor | None = None) -> None:
        self.layout = layout
        self.flat = flat
        self.whole = flat if whole is None or whole.numel() == flat.numel() else whole
        self.reduction: Operation | None = None
        """Sums ``whole`` over ranks."""
        self.of_batches = self._views(layout.of_batches)
        """Of each batch of matrices, ``(count, rank, length)``."""

    @functools.cached_property
    def of_groups(self) -> list[list[Tensor]]:
        """Of each group, those of each length."""
        return [self._views(group) for group in self.layout.groups]

    @functools.cached_property
    def each(self) -> list[Tensor]:
        """The factors of each matrix, ``(rank, length)``, in the order of batches."""
        return [factor for of_batch in self.of_batches for factor in of_batch.unbind()]

    def _views(self, views: Sequence[_View]) -> list[Tensor]:
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
    which is the same on all ranks and changes no product. ``dtype`` is that in which this computes.
    """

    def __init__(self, batch: Batch, gradients: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._batch, self._dtype = batch, dtype
        self._given = [gradients[place] for place in batch.places]
        self.gradients = list(map(self._as_matrix, self._given))
        self.residuals: Sequence[Tensor | None] = ()
        """Those that are not in the gradients yet, of ``dtype``."""
        self.numel = len(batch.places) * batch.rows * batch.cols
        """Elements of all."""
        is_alone = len(self.gradients) == 1 and self.gradients[0].dtype == dtype
        self._alone = self.gradients[0][None] if is_alone else None

    def _as_matrix(self, tensor: Tensor) -> Tensor:
        rows, cols = self._batch.rows, self._batch.cols
        return tensor if tensor.ndim == 2 else tensor.as_strided((rows, cols), (cols, 1))

    def load(self) -> Tensor:
        """M, ``(count, rows, cols)``: a copy, unless one matrix is alone."""
        if self._alone is not None:
            return self._alone
        matrices = torch.stack(self.gradients).to(self._dtype)
        errors = [(row, error) for row, error in enumerate(self.residuals) if error is not None]
        add_all([matrices[row] for row, _ in errors], [self._as_matrix(error) for _, error in errors])
        return matrices

    def decompress(
        self, own: tuple[Tensor, Tensor], mean: tuple[Tensor, Tensor], out: Tensor | None
    ) -> Sequence[Tensor]:
        """Write P Q^T of the ``mean`` factors to the gradients; returns M - P Q^T of this rank's ``own`` factors,
        shaped as the gradients, in ``out``, which is flat; nothing where that is ``None``."""
        matrices = self.load()
        errors = None if out is None else out.view(matrices.shape)
        if errors is not None and self._alone is not None and not has_streams(matrices.device):
            # A block of rows stays in the CPU's cache between the two products.
            parts = (matrices[0], errors[0], own[0][0].t(), mean[0][0].t())
            for matrix, error, own_p, mean_p in zip(*(part.split(_CPU_BLOCK_ROWS) for part in parts), strict=True):
                torch.addmm(matrix, own_p, own[1][0], alpha=-1, out=error)
                torch.mm(mean_p, mean[1][0], out=matrix)
        else:
            if errors is not None:
                torch.baddbmm(matrices, own[0].mT, own[1], alpha=-1, out=errors)
            torch.bmm(mean[0].mT, mean[1], out=matrices)
            if self._alone is None:
                copy_all(self.gradients, matrices.unbind())
        self.residuals = ()
        # As matrices, whose columns are in the order of the gradient's memory, they were made of it.
        return [
            error if gradient.ndim == 2 else error.as_strided(gradient.size(), gradient.stride())
            for error, gradient in zip(
                () if errors is None else errors.unbind(), self._given, strict=errors is not None
            )
        ]
