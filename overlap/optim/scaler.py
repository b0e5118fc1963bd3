"""Updates that depend on whether gradients are finite: under ``torch.amp.GradScaler``, and after ``SkipNonFinite``.

``GradScaler`` always steps an optimizer with ``_step_supports_amp_scaling``; before that it sets ``found_inf`` (a
gradient of this rank is not finite) and ``grad_scale`` on it. Each rank must then call ``step()``, even a skipped one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._torch.device import has_streams
from overlap._torch.foreach import scale_

__all__ = ["Verdict", "skips_by_itself"]


@dataclass(frozen=True)
class Verdict:
    """Whether the gradients of a pass are finite: of a stage, or of ``GradScaler``; none at first."""

    found_inf: Tensor | None = None
    """Not zero where a gradient is not finite, so that the update must change nothing; ``None``: nobody has asked."""
    scale: Tensor | None = None
    """The factor of the loss; ``None`` without a scaler, and where ``unscale_`` has divided gradients already."""

    @classmethod
    def given_to(cls, optimizer: Optimizer) -> Verdict:
        """That of the scaler that calls ``optimizer.step()``."""
        return cls(optimizer.__dict__.get("found_inf"), optimizer.__dict__.get("grad_scale"))

    @classmethod
    def of_any(cls, verdicts: Iterable[Verdict]) -> Verdict:
        """Not finite where any of ``verdicts`` is not; without a scale."""
        found = [each.found_inf.reshape(()) for each in verdicts if each.found_inf is not None]
        return cls(torch.stack(found).amax() if len(found) > 1 else found[0] if found else None)

    def skips(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` is not to be stepped. On an accelerator this is left to its kernel, if that can skip,
        so that the host does not wait."""
        if self.found_inf is None or (has_streams(self.found_inf.device) and skips_by_itself(optimizer)):
            return False
        return bool(self.found_inf.item())

    def is_supported_by(self, optimizer: Optimizer) -> bool:
        """Whether there is a scaler's verdict, and ``optimizer`` unscales and skips by itself."""
        return self.found_inf is not None and bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        if self.scale is not None and gradients:
            scale_(gradients, self.scale.double().reciprocal().float())

    @contextmanager
    def passed_to(self, optimizer: Optimizer) -> Iterator[None]:
        """Set the verdict on ``optimizer`` while it steps, if that takes one, as ``GradScaler`` does."""
        if not self.is_supported_by(optimizer):
            yield
            return
        optimizer.grad_scale, optimizer.found_inf = self.scale, self.found_inf  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def skips_by_itself(optimizer: Optimizer) -> bool:
    """Whether the kernel of ``optimizer`` takes ``found_inf`` and then changes nothing; SGD's does not with
    momentum."""
    is_supported = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return is_supported and not any(group.get("momentum") for group in optimizer.param_groups)
