"""Gradients that a loop changes between backward and step, which ranks that have run out of inputs do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._torch.autograd import version
from overlap._torch.optimizer import is_called_by_grad_scaler
from overlap.errors import TrainingLoopError

__all__ = ["ReducedGradients"]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReducedGradients:
    """Tells whether ``.grad`` is what the last synchronized backward has left."""

    def __init__(self) -> None:
        self._left: dict[Tensor, _Left | None] = {}

    def note(self, parameters: Iterable[Tensor]) -> None:
        """A backward is over, which ranks without inputs have replayed."""
        for parameter in parameters:
            self._left[parameter] = None if parameter.grad is None else _Left.by(parameter.grad)

    def check(self, optimizer: Optimizer, missing: Sequence[int]) -> None:
        """Called before ``optimizer`` steps, while the ranks ``missing`` have run out of inputs.

        Raises:
            TrainingLoopError: a gradient was changed.
        """
        # The kernel with which GradScaler unscales does not count as a change.
        is_scaled = is_called_by_grad_scaler()
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            if parameter in self._left and (is_scaled or not _is_same(self._left[parameter], parameter.grad)):
                raise TrainingLoopError(
                    f"gradients were changed between backward and {type(optimizer).__name__}.step() (by clipping or "
                    f"GradScaler, say), and ranks {missing}, which have run out of inputs, step with the mean that "
                    "backward left: clip with Step(optimizer, clip_grad_norm=...), ZeroStep(zero, clip_grad_norm=...) "
                    "or LocalSGD(..., transforms=[ClipGradNorm(...)]), and leave GradScaler out (bfloat16 needs none)"
                )


@dataclass(frozen=True)
class _Left:
    """A gradient as backward left it, without keeping its memory."""

    address: int
    version: int
    bits: Tensor | None
    """A sum over the bits of all elements; what only multiplies by 1, as clipping with an infinite norm, leaves it."""

    @classmethod
    def by(cls, gradient: Tensor) -> _Left:
        return cls(_address(gradient), version(gradient), _bits(gradient))


def _is_same(left: _Left | None, gradient: Tensor | None) -> bool:
    if left is None or gradient is None:
        return left is None and gradient is None
    if (left.address, left.version) == (_address(gradient), version(gradient)):
        return True
    now = _bits(gradient)
    return left.bits is not None and now is not None and bool(left.bits == now)


def _address(gradient: Tensor) -> int:
    return 0 if gradient.is_sparse else gradient.data_ptr()


@torch.no_grad()
def _bits(gradient: Tensor) -> Tensor | None:
    if gradient.is_sparse:
        return None
    real = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return real.view(_INTEGERS[real.element_size()]).sum(dtype=torch.int64)
