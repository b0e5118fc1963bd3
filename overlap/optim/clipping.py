"""Clipping by the global norm, of gradients whose own norms are known already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap._torch.foreach import norms
from overlap.errors import ConfigurationError
from overlap.optim.gradient_versions import GradientVersions

__all__ = ["Clipping", "GradientNorms"]


@dataclass(frozen=True)
class Clipping:
    """Scale gradients so that their global norm is at most ``max_norm``."""

    max_norm: float
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ConfigurationError(f"clip_grad_norm must be positive, got {self.max_norm}")
        if not self.norm_type > 0:
            raise ConfigurationError(f"norm_type must be positive (float('inf') for the maximum), got {self.norm_type}")

    def scale_(self, gradients: Sequence[Tensor], gradient_norms: Sequence[Tensor]) -> Tensor:
        """Clip ``gradients`` in place, given the norm of each; returns their global norm, a 0-dimensional tensor.

        Bit for bit ``torch.nn.utils.clip_grad_norm_``, which computes the norms itself.
        """
        total: Tensor = torch.linalg.vector_norm(torch.stack(_grouped(gradients, gradient_norms)), self.norm_type)
        self.scale_to_(gradients, total)
        return total

    def scale_to_(self, gradients: Sequence[Tensor], total: Tensor) -> None:
        """Clip ``gradients`` in place, given the global norm of all there are."""
        holders = [_Holder(gradient) for gradient in gradients]
        torch.nn.utils.clip_grads_with_norm_(holders, self.max_norm, total)  # type: ignore[arg-type]


class _Holder:
    """What ``clip_grads_with_norm_`` wants of a parameter."""

    def __init__(self, grad: Tensor) -> None:
        self.grad = grad


def _grouped(gradients: Sequence[Tensor], gradient_norms: Sequence[Tensor]) -> list[Tensor]:
    """The norms in the order in which ``clip_grad_norm_`` adds them up: by device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient, norm in zip(gradients, gradient_norms, strict=True):
        groups.setdefault((gradient.device, gradient.dtype), []).append(norm)
    device = gradients[0].device
    return [norm.to(device) for group in groups.values() for norm in group]


class GradientNorms:
    """Norms of gradients, taken bucket by bucket as they come, for as long as the gradients stay as they are."""

    def __init__(self, norm_type: float) -> None:
        self._norm_type = norm_type
        self._norms: dict[int, Tensor] = {}
        self._versions = GradientVersions()

    def clear(self) -> None:
        """A new backward begins."""
        self._norms.clear()
        self._versions = GradientVersions()

    def take(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Note the norms of ``gradients``, those of ``parameters``."""
        if parameters:
            self._norms.update(zip(map(id, parameters), norms(gradients, self._norm_type), strict=True))

    def note_gradients(self, parameters: Iterable[Tensor]) -> None:
        """``.grad`` of ``parameters`` now holds what was noted: a later change makes the note void."""
        self._versions = GradientVersions(parameters)

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The norm of each parameter's ``.grad``, which must not be ``None``; computed where no note of it holds."""
        stale = [p for p in parameters if id(p) not in self._norms or not self._versions.hold(p)]
        if stale:
            self.take(stale, [parameter.grad for parameter in stale if parameter.grad is not None])
        return self.noted(parameters)

    def noted(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The norms as noted, wherever the gradients are."""
        return [self._norms[id(parameter)] for parameter in parameters]
