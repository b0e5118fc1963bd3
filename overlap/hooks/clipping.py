"""Clipping by the global norm: one implementation, for stages that clip and for updates that do."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._checks import as_number, told
from overlap._torch.foreach import by_kind, norms
from overlap.errors import ConfigurationError

__all__ = ["Clipping", "ShardedNorm", "check_norm_type"]


@dataclass(frozen=True)
class Clipping:
    """Scale gradients so that their global norm is at most ``max_norm``; messages call that ``argument``."""

    max_norm: float
    norm_type: float = 2.0
    argument: str = "clip_grad_norm"

    def __post_init__(self) -> None:
        _check_positive(self.argument, self.max_norm)
        check_norm_type(self.norm_type)

    def total(self, gradients: Sequence[Tensor], gradient_norms: Sequence[Tensor]) -> Tensor:
        """The global norm of ``gradients``, given the norm of each; a 0-dimensional tensor.

        Bit for bit that of ``torch.nn.utils.clip_grad_norm_``, which computes the norms itself.
        """
        total: Tensor = torch.linalg.vector_norm(torch.stack(_grouped(gradients, gradient_norms)), self.norm_type)
        return total

    def scale_(self, gradients: Sequence[Tensor], gradient_norms: Sequence[Tensor]) -> Tensor:
        """Clip ``gradients`` in place, given the norm of each; returns their global norm, as :meth:`total`."""
        total = self.total(gradients, gradient_norms)
        self.scale_to_(gradients, total)
        return total

    def scale_to_(self, gradients: Sequence[Tensor], total: Tensor) -> None:
        """Clip ``gradients`` in place, given the global norm of all there are."""
        holders = [_Holder(gradient) for gradient in gradients]
        torch.nn.utils.clip_grads_with_norm_(holders, self.max_norm, total)  # type: ignore[arg-type]


def check_norm_type(norm_type: float) -> float:
    """``norm_type`` itself. Raises: ConfigurationError: it is not a positive number."""
    _check_positive("norm_type", norm_type, hint=" (float('inf') for the maximum)")
    return norm_type


def _check_positive(name: str, value: object, *, hint: str = "") -> None:
    number = as_number(value)
    if number is None:
        raise ConfigurationError(f"{name} is a number, got {told(value)}")
    if not number > 0:
        raise ConfigurationError(f"{name} must be positive{hint}, got {told(value)}")


class _Holder:
    """What ``clip_grads_with_norm_`` wants of a parameter."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad


def _grouped(gradients: Sequence[Tensor], gradient_norms: Sequence[Tensor]) -> list[Tensor]:
    """The norms in the order in which ``clip_grad_norm_`` adds them up: by device and dtype."""
    device = gradients[0].device
    return [gradient_norms[place].to(device) for places in by_kind(gradients) for place in places]


class ShardedNorm:
    """Clips by the global norm of gradients of which each rank has a part: local powers, a sum over ranks, a root.

    The norm has the dtype that ``torch.nn.utils.clip_grad_norm_`` gives it: what those of all ``parameters`` of the
    model promote to, also where this rank has parts of some of them only.
    """

    def __init__(
        self, clipping: Clipping, gradients: Sequence[Tensor], parameters: Iterable[Tensor], device: torch.device
    ) -> None:
        self._clipping = clipping
        dtypes = {parameter.dtype for parameter in parameters}
        self._dtype = functools.reduce(torch.promote_types, dtypes).to_real() if dtypes else torch.float32
        # An empty part has no maximum.
        self._gradients = [gradient for gradient in gradients if gradient.numel()]
        self._is_max = clipping.norm_type == float("inf")
        each = [norm.double() for norm in norms(self._gradients, clipping.norm_type)] if self._gradients else []
        stacked = torch.stack(each) if each else torch.zeros(1, dtype=torch.float64, device=device)
        self.partial = stacked.max() if self._is_max else stacked.pow(clipping.norm_type).sum()
        """This rank's part, which the caller all-reduces in place with :attr:`op`."""

    @property
    def op(self) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.MAX if self._is_max else dist.ReduceOp.SUM

    @property
    def total(self) -> Tensor:
        """The global norm, after :attr:`partial` was all-reduced."""
        return (self.partial if self._is_max else self.partial.pow(1 / self._clipping.norm_type)).to(self._dtype)

    def clip_(self) -> Tensor:
        """Scale the gradients in place, after :attr:`partial` was all-reduced; returns the global norm."""
        total = self.total
        self._clipping.scale_to_(self._gradients, total)
        return total
