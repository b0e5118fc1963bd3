"""Orthonormal bases, by the algorithm that suits device and shape.

Bases are batches ``(count, rank, length)`` of at most ``length`` directions in rows. All algorithms keep the
span of the rows and always give a whole basis: where rows are zero or depend on each other, directions of no
particular kind fill the place, so a zero gradient needs no guard. None of them reads a value on the host.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from overlap._torch.device import has_streams

__all__ = ["cholesky_qr", "gram_schmidt", "householder", "orthonormalize"]

# Below these ranks the loop of Gram-Schmidt is fewer kernels than Cholesky-QR.
_GRAM_SCHMIDT_RANK = 2


def orthonormalize(rows: Tensor, spare: Callable[[], Tensor], *, epsilon: float = 0.0) -> Tensor:
    """An orthonormal basis of the span of each batch of rows.

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
    return torch.where(is_whole, basis, unit).to(rows.dtype), lengths.nan_to_num(0.0).to(rows.dtype)


def _cholesky_round(rows: Tensor) -> tuple[Tensor, Tensor]:
    # cholesky_ex and not cholesky, which reads on the host whether it went well.
    lower, _ = torch.linalg.cholesky_ex(rows @ rows.mT)
    return torch.linalg.solve_triangular(lower, rows, upper=False), lower


def _length(rows: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return length
