"""What PowerSGD remembers of one parameter."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap._torch.device import hold
from overlap.errors import ConfigurationError

__all__ = ["Slot", "as_matrix"]


@dataclass(frozen=True)
class ColumnOrder:
    """The order of a matrix's columns, where the dimensions behind the first lie in memory otherwise than in the shape.

    So it is in formats such as ``channels_last``.
    """

    lengths: tuple[int, ...]
    """Those of the dimensions behind the first."""
    dims: tuple[int, ...]
    """Their places in ``lengths``, the outermost in memory first."""

    @classmethod
    def of(cls, gradient: Tensor) -> ColumnOrder | None:
        """That of a gradient that is a matrix as it lies in memory; ``None`` where it is that of the shape."""
        lengths, strides = tuple(gradient.shape[1:]), gradient.stride()[1:]
        dims = tuple(sorted(range(len(lengths)), key=lambda dim: -strides[dim]))
        is_by_rows = gradient.ndim > 2 and gradient.stride(0) == math.prod(lengths)
        return cls(lengths, dims) if is_by_rows and not gradient.is_contiguous() else None

    def from_shape(self, factor: Tensor) -> Tensor:
        """A factor ``(rank, columns)`` in this order."""
        parts = factor.reshape(-1, *self.lengths).permute(0, *(dim + 1 for dim in self.dims))
        return parts.reshape(factor.shape)

    def to_shape(self, factor: Tensor) -> Tensor:
        """The inverse of :meth:`from_shape`."""
        parts = factor.reshape(-1, *(self.lengths[dim] for dim in self.dims))
        back = sorted(range(len(self.dims)), key=self.dims.__getitem__)
        return parts.permute(0, *(place + 1 for place in back)).reshape(factor.shape)


@dataclass
class Slot:
    """The memory of one parameter."""

    key: str
    residual: Tensor | None = None
    """What compression has left out of this rank's gradients; shaped and strided as the gradient."""
    velocity: Tensor | None = None
    """With momentum, what of it has not been sent; shaped as the gradient."""
    factor: Tensor | None = None
    """The mean factor ``(rank, length)`` to start from, the same on every rank."""
    is_left: bool = False
    """Whether ``factor`` is a left one; where factors alternate, it is in every other step."""
    columns: ColumnOrder | None = None
    """The order of the columns of a right factor, where it is not that of the shape."""

    def arrange(self, gradient: Tensor) -> None:
        """Bring a right factor into the order in which ``gradient`` lies in memory."""
        columns = ColumnOrder.of(gradient)
        if columns != self.columns:
            self.factor = self.factor_by_shape
            if columns is not None and self.factor is not None and not self.is_left:
                self.factor = columns.from_shape(self.factor)
            self.columns = columns

    @property
    def factor_by_shape(self) -> Tensor | None:
        """The factor with columns in the order of the shape, as checkpoints have it."""
        if self.columns is None or self.factor is None or self.is_left:
            return self.factor
        return self.columns.to_shape(self.factor)

    def residual_like(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """The residual in the layout of ``gradient``, made of zeros if there is none.

        Raises:
            ConfigurationError: the residual was loaded for a parameter of another shape.
        """
        found = self._like("residual", self.residual, gradient, dtype)
        if found is None:
            found = _empty_like(gradient, dtype).zero_()
        self.residual = found
        return found

    def velocity_like(self, gradient: Tensor) -> Tensor | None:
        """The velocity in the layout of ``gradient``, if there is one.

        Raises:
            ConfigurationError: it was loaded for a parameter of another shape.
        """
        self.velocity = self._like("velocity", self.velocity, gradient, gradient.dtype)
        return self.velocity

    def _like(self, what: str, found: Tensor | None, gradient: Tensor, dtype: torch.dtype) -> Tensor | None:
        if found is None:
            return None
        if found.shape != gradient.shape:
            raise ConfigurationError(
                f"the {what} of parameter {self.key} has shape {tuple(found.shape)}, but its gradient has "
                f"{tuple(gradient.shape)}: the state of another model was loaded"
            )
        if (found.stride(), found.dtype, found.device) == (gradient.stride(), dtype, gradient.device):
            return found
        return _empty_like(gradient, dtype).copy_(hold(found))

    def check_factor(self, factor: Tensor, length: int) -> None:
        """Raises: ConfigurationError: the directions of ``factor`` do not have ``length`` elements."""
        if factor.ndim != 2 or factor.shape[1] != length:
            raise ConfigurationError(
                f"the factor of parameter {self.key} has shape {tuple(factor.shape)}, but here its directions have "
                f"{length} elements: the state comes from another model; to go on with the residuals and new factors, "
                "load it with state['factors'] = {}"
            )


def as_matrix(gradient: Tensor) -> Tensor:
    """A view ``(rows, cols)`` of a gradient of two or more dimensions, as it lies in memory.

    In memory formats such as channels-last the columns of a row are in another order than in the shape, which is the
    same on all ranks and changes no product.
    """
    if gradient.ndim == 2:
        return gradient
    rows = gradient.shape[0]
    cols = gradient.numel() // rows
    return gradient.as_strided((rows, cols), (cols, 1))


def _empty_like(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(gradient.size(), gradient.stride(), dtype=dtype, device=gradient.device)
