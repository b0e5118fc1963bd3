"""Whether an update is to change nothing, because a stage before it found gradients that are not finite."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._torch.device import has_streams
from overlap.optim.grad_scaler import LossScale

__all__ = ["Veto"]


class Veto:
    """What was found of one pass: nothing, or a tensor that is not zero where the update must change nothing.

    On the CPU the update is then not made. On an accelerator only the optimizer's kernel knows, as of ``GradScaler``'s
    verdict, so that the host does not wait.
    """

    def __init__(self, found_inf: Tensor | None = None) -> None:
        self.found_inf = found_inf

    def clear(self) -> None:
        """Nothing was found."""
        self.found_inf = None

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
    def of_any(cls, vetoes: Iterable[Veto]) -> Veto:
        """One that stops where any of ``vetoes`` does."""
        found = [veto.found_inf.reshape(()) for veto in vetoes if veto.found_inf is not None]
        return cls(torch.stack(found).amax() if len(found) > 1 else found[0] if found else None)
