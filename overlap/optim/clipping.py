"""Norms of gradients that are known before they are clipped."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import Tensor

from overlap._torch.autograd import version
from overlap._torch.device import has_streams
from overlap._torch.foreach import norms
from overlap.optim.fingerprint import is_sampled

__all__ = ["GradientNorms"]


class GradientNorms:
    """Norms of gradients, taken bucket by bucket as they come, for as long as the gradients stay as they are."""

    def __init__(self, norm_type: float) -> None:
        self._norm_type = norm_type
        self._norms: dict[int, Tensor] = {}
        self._versions: dict[int, tuple[weakref.ref[Tensor], int]] = {}
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
        """``.grad`` of ``parameters`` now holds what was noted; a later change invalidates the note."""
        self._versions = {id(p): (weakref.ref(p.grad), version(p.grad)) for p in parameters if p.grad is not None}

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
        return noted[0]() is gradient and noted[1] == version(gradient)

    def noted(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """The norms as noted, wherever the gradients are."""
        return [self._norms[id(parameter)] for parameter in parameters]
