"""Clipping by the global norm, of gradients whose own norms are known already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from overlap._torch.autograd import version
from overlap._torch.device import has_streams
from overlap._torch.foreach import norms
from overlap.errors import ConfigurationError
from overlap.optim.fingerprint import is_sampled

__all__ = ["Clipping", "GradientNorms"]


@dataclass(frozen=True)
class Clipping:
    """Scale gradients so that their global norm is at most ``max_norm``."""

    max_norm: float
    norm_type: float = 2.0

    def __post_init__(self) -> None:
        for name, value in (("clip_grad_norm", self.max_norm), ("norm_type", self.norm_type)):
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ConfigurationError(f"{name} is a number, got {value!r}")
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
        self._versions: dict[int, tuple[Tensor, int]] = {}
        self._passes = 0
        self._has_seen_edits = False

    def clear(self) -> None:
        """A new backward begins."""
        self._norms.clear()
        self._versions.clear()
        self._passes += 1

    def take(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Note the norms of ``gradients``, those of ``parameters``."""
        if parameters:
            self._norms.update(zip(map(id, parameters), norms(gradients, self._norm_type), strict=True))

    def note_gradients(self, parameters: Iterable[Tensor]) -> None:
        """``.grad`` of ``parameters`` now holds what was noted: a later change makes the note void."""
        self._versions = {id(p): (p.grad, version(p.grad)) for p in parameters if p.grad is not None}

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The norm of each parameter's ``.grad``, which must not be ``None``; computed where no note of it holds."""
        stale = list(parameters) if self._may_be_stale else [p for p in parameters if not self._holds(p)]
        if stale:
            before = dict(self._norms)
            self.take(stale, [parameter.grad for parameter in stale if parameter.grad is not None])
            if not has_streams(stale[0].device):
                held = [id(p) for p in stale if self._holds(p)]
                self._has_seen_edits |= any(bool(before[key] != self._norms[key]) for key in held)
        return self.noted(parameters)

    @property
    def _may_be_stale(self) -> bool:
        """Whether to compute every norm: an edit through ``.data`` raises no version. See [Note: edits by value]."""
        return self._has_seen_edits or is_sampled(self._passes)

    def _holds(self, parameter: Tensor) -> bool:
        """Whether its norm was noted, and ``.grad`` is the tensor that it was, at the same version."""
        noted, gradient = self._versions.get(id(parameter)), parameter.grad
        if gradient is None or noted is None or id(parameter) not in self._norms:
            return False
        return noted[0] is gradient and noted[1] == version(gradient)

    def noted(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The norms as noted, wherever the gradients are."""
        return [self._norms[id(parameter)] for parameter in parameters]
