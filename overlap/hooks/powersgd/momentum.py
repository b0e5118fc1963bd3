"""Momentum before compression: momentum correction and momentum factor masking.

[Note: momentum before compression]

Momentum behind compression goes on for ten steps with each gradient, late ones included, so that what was left out for
a while arrives as if it were new. Deep Gradient Compression (Lin et al., 2018) moves it before compression: each rank
keeps a velocity ``u = momentum * u + gradient`` of its own, and ``u`` is compressed in place of the gradient (momentum
correction). What is sent is then removed from ``u`` (momentum factor masking), since otherwise it would arrive again,
later. Their masks are elements; here, what is sent of a matrix is its part in the basis, so ``u`` becomes
``u - basis basis^T u``. In matrices momentum is thus only for directions that wait.

Gradients that are not compressed are sent as their velocities, whole, and nothing is removed: their mean is what SGD's
momentum gives on the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import told
from overlap._torch.device import has_streams, hold
from overlap.errors import ConfigurationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.finite import all_finite
from overlap.hooks.powersgd.algorithm import Compressed
from overlap.hooks.powersgd.slot import Slot, as_matrix
from overlap.hooks.stage import StageContext

__all__ = ["Momentum", "momentum_of"]


class Momentum:
    """The velocities of one model's gradients on this rank, and a look at the optimizer, which must have none."""

    def __init__(self, momentum: float, optimizer: Optimizer) -> None:
        self._momentum = momentum
        self._optimizer = optimizer
        # Of the parameters that are reduced here; empty where they are not known.
        self._names: dict[int, str] = {}

    def attach(self, context: StageContext) -> None:
        """Raises: ConfigurationError: it is not the optimizer of this model, or has a momentum of its own."""
        names = {id(parameter): name for parameter, name in (context.names or {}).items()}
        owned = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        if missing := [name for key, name in names.items() if key not in owned]:
            raise ConfigurationError(
                f"optimizer= of PowerSGD does not have the parameter {missing[0]} (of {len(missing)}): give the "
                "optimizer that updates this model"
            )
        self._names = names
        for place, group in enumerate(self._optimizer.param_groups):
            others = [one for one in group["params"] if one.requires_grad and id(one) not in names]
            if names and others and self._is_own(group):
                raise ConfigurationError(
                    f"group {place} of {_name(self._optimizer)} has {len(others)} parameters that this PowerSGD does "
                    f"not reduce, one of shape {tuple(others[0].shape)}; they would have no momentum at all: put them "
                    "into a group of their own"
                )
        self.check()

    def check(self) -> None:
        """Raises: ConfigurationError: the optimizer has a momentum of its own for what is reduced here."""
        for group in self._optimizer.param_groups:
            own = group.get("momentum", group.get("betas"))
            if own != 0 and self._is_own(group):
                raise ConfigurationError(
                    f"PowerSGD applies momentum={self._momentum} before it compresses, and {_name(self._optimizer)} "
                    f"has {'no such option' if own is None else f'its own of {own}'}: give SGD(..., momentum=0), or "
                    "make PowerSGD without momentum="
                )

    def _is_own(self, group: dict[str, Any]) -> bool:
        return not self._names or any(id(parameter) in self._names for parameter in group["params"])

    def add_to(self, bucket: Bucket, slots: Sequence[Slot]) -> list[Tensor]:
        """Turn the gradients into velocities, and return a copy of these; nothing is kept yet."""
        found = []
        for gradient, slot in zip(bucket.gradients, slots, strict=True):
            velocity = slot.velocity_like(gradient)
            if velocity is not None:
                gradient.add_(hold(velocity), alpha=self._momentum)
            found.append(gradient.clone())
        return found

    def keep(self, bucket: Bucket, slots: Sequence[Slot], found: Sequence[Tensor], sent: Compressed | None) -> None:
        """Keep velocities, without what was sent of the compressed ones, where the outcome is finite."""
        if sent is not None:
            for batch in sent.layout.batches:
                rows = batch.factors(sent.basis, is_left=sent.is_left)
                for place, basis in zip(batch.places, rows.unbind(), strict=True):
                    _remove(as_matrix(found[place]), basis, is_left=sent.is_left)
        # The outcome is the same on all ranks, and so is the answer.
        if not has_streams(bucket.buffer.device) and bool(all_finite(bucket.buffer)):
            for slot, velocity in zip(slots, found, strict=True):
                slot.velocity = velocity
            return
        for slot, velocity, outcome in zip(slots, found, bucket.gradients, strict=True):
            old = torch.zeros_like(velocity) if slot.velocity is None else hold(slot.velocity)
            slot.velocity = torch.where(outcome.isfinite().all(), velocity, old)


def momentum_of(momentum: float, optimizer: Optimizer | None) -> Momentum | None:
    """Raises: ConfigurationError: there is one without the other, or ``optimizer`` is something else."""
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ConfigurationError(f"optimizer is the torch.optim.Optimizer that updates, or None, got {told(optimizer)}")
    if (momentum > 0) != (optimizer is not None):
        raise ConfigurationError(
            "momentum= and optimizer= go together: PowerSGD applies the momentum, so optimizer= is the one that "
            "updates the model, made without momentum, as in PowerSGD(momentum=0.9, optimizer=SGD(..., momentum=0))"
        )
    return None if optimizer is None else Momentum(momentum, optimizer)


def _remove(matrix: Tensor, basis: Tensor, *, is_left: bool) -> None:
    """``matrix`` without its part in the span of ``basis``, orthonormal directions in rows, in place."""
    wide = matrix.to(basis.dtype)
    if is_left:
        wide.addmm_(basis.t(), basis @ wide, alpha=-1)
    else:
        wide.addmm_(wide @ basis.t(), basis, alpha=-1)
    if wide is not matrix:
        matrix.copy_(wide)


def _name(optimizer: Optimizer) -> str:
    return type(optimizer).__name__
