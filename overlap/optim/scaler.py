"""Updates that depend on whether gradients are finite: under ``torch.amp.GradScaler``, and after ``SkipNonFinite``.

``GradScaler`` always steps an optimizer with ``_step_supports_amp_scaling``; before that it sets ``found_inf`` (a
gradient of this rank is not finite) and ``grad_scale`` on it. Each rank must then call ``step()``, even a skipped one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._torch.device import has_streams
from overlap._torch.foreach import scale_

__all__ = ["LossScale", "Veto", "skips_by_itself"]


@dataclass(frozen=True)
class LossScale:
    """The values that the scaler sets on an optimizer before ``step()``: none if there is no scaler."""

    found_inf: Tensor | None = None
    """Not zero where a gradient is not finite."""
    scale: Tensor | None = None
    """The factor of the loss; ``None`` where ``GradScaler.unscale_`` has divided gradients already."""

    @classmethod
    def given_to(cls, optimizer: Optimizer) -> LossScale:
        return cls(optimizer.__dict__.get("found_inf"), optimizer.__dict__.get("grad_scale"))

    @property
    def is_used(self) -> bool:
        """Whether there is a scaler."""
        return self.found_inf is not None

    def verdict_for(self, optimizer: Optimizer) -> Tensor | None:
        """The verdict, if it is left to the kernel of ``optimizer``, so that the host need not wait for the device."""
        is_left = self.found_inf is not None and has_streams(self.found_inf.device) and skips_by_itself(optimizer)
        return self.found_inf if is_left else None

    def skips_step(self, optimizer: Optimizer) -> bool:
        """Whether the step of ``optimizer`` is to be skipped; the host waits for what it does not leave to the kernel,
        see :meth:`verdict_for`."""
        return self.found_inf is not None and self.verdict_for(optimizer) is None and bool(self.found_inf.item())

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        if self.scale is not None and gradients:
            scale_(gradients, self.scale.double().reciprocal().float())

    def is_supported_by(self, optimizer: Optimizer) -> bool:
        """Whether the kernel of ``optimizer`` unscales and skips, so that the host need not wait for the verdict."""
        return self.is_used and bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    @contextmanager
    def passed_to(self, optimizer: Optimizer) -> Iterator[None]:
        """Tell ``optimizer`` in turn, while it steps."""
        optimizer.grad_scale, optimizer.found_inf = self.scale, self.found_inf  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def skips_by_itself(optimizer: Optimizer) -> bool:
    """Whether the kernel of ``optimizer`` takes ``found_inf`` and then changes nothing; SGD's does not with
    momentum."""
    is_told = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return is_told and not any(group.get("momentum") for group in optimizer.param_groups)


class Veto:
    """The verdict on one pass: none, or a tensor that is not zero where the update must change nothing.

    On the CPU the update is then not made. On an accelerator only the optimizer's kernel knows, as of ``GradScaler``'s
    verdict, so that the host does not wait.
    """

    def __init__(self, found_inf: Tensor | None = None) -> None:
        self.found_inf = found_inf

    @property
    def stops(self) -> bool:
        """Whether the update is not to be made; ``False`` where only the kernel knows."""
        return self.found_inf is not None and not has_streams(self.found_inf.device) and bool(self.found_inf.item())

    def passed_to(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Tell ``optimizer`` while it steps, on an accelerator."""
        if self.found_inf is None or not has_streams(self.found_inf.device):
            return nullcontext()
        return LossScale(self.found_inf).passed_to(optimizer)

    @classmethod
    def of_any(cls, found: Sequence[Tensor | None]) -> Veto:
        """One that stops where any of ``found`` is not zero."""
        present = [each.reshape(()) for each in found if each is not None]
        return cls(torch.stack(present).amax() if len(present) > 1 else present[0] if present else None)
