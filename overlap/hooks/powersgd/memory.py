"""PowerSGD's memory: the errors of any stage that rounds, here called residuals, plus factors and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from overlap._torch.device import hold
from overlap.errors import ConfigurationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.stage import StageContext
from overlap.hooks.wires import StageMemory, Wire
from overlap.hooks.wires.feedback import check_shape, summed_errors

__all__ = ["Memory", "redistribute"]

_KEYS = {"rank", "ranks", "steps", "residuals", "factors", "is_left", "numel", "generator"}


class Memory(StageMemory):
    """The memory of one rank for one model, by parameter name, so that it does not depend on buckets.

    The name is the fully qualified one. Where only a hook is registered, names are not known; parameters are then
    numbered in the order in which their gradients first arrive, which depends on the model alone.
    """

    def __init__(self, owner: object, *, wire: Wire | None) -> None:
        super().__init__(owner, error_feedback=True, wire=wire)
        self.left: dict[str, Tensor] = {}
        """Mean left factors ``(rank, rows)`` of the last pass, the same on every rank."""
        self.right: dict[str, Tensor] = {}
        """Mean right factors ``(rank, cols)``, with columns in the order of the gradient's memory. A parameter has one
        of the two: only where factors alternate is it ever the left one."""
        self.steps = 0
        """Backward passes begun."""
        self.numel_before = 0
        """Elements of all compressed passes so far, before compression."""
        self.numel_after = 0
        """And after it."""
        self.kept: dict[tuple[object, ...], Tensor] = {}
        """Spare directions and workspace that last from step to step; not saved."""
        # By id of a parameter, where names are not known.
        self._numbers: dict[int, str] = {}

    def attach(self, context: StageContext) -> None:
        super().attach(context)
        self._numbers = {}

    def keys_of(self, bucket: Bucket) -> tuple[str, ...]:
        """The names of the bucket's parameters in this memory."""
        if bucket.fqns is not None:
            return bucket.fqns
        numbers = self._numbers
        return tuple(numbers.setdefault(id(parameter), str(len(numbers))) for parameter in bucket.parameters)

    def residual(self, key: str, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """The residual of a parameter in the memory format of ``gradient``, zeros if there is none.

        Raises:
            ConfigurationError: the residual was loaded for a parameter of another shape.
        """
        found = self.errors.get(key)
        if found is not None:
            check_shape(f"parameter {key}", found, gradient)
            if (found.stride(), found.dtype, found.device) == (gradient.stride(), dtype, gradient.device):
                return found
        new = torch.empty_strided(gradient.size(), gradient.stride(), dtype=dtype, device=gradient.device)
        self.errors[key] = new.zero_() if found is None else new.copy_(hold(found))
        return new

    def release(self, key: str, gradient: Tensor) -> None:
        """Add the residual of a parameter that is no longer compressed, as after loading with another rank."""
        self.left.pop(key, None)
        self.right.pop(key, None)
        if (residual := self.errors.pop(key, None)) is not None:
            gradient.add_(hold(residual))

    def compression_stats(self) -> tuple[float, int, int]:
        """The ratio of elements before and after compression (0 before any was sent), and both numbers."""
        return self.numel_before / max(1, self.numel_after), self.numel_before, self.numel_after

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`PowerSGD.state_dict`."""
        rank, ranks = self.place or (None, None)
        return {
            "rank": rank,
            "ranks": ranks,
            "steps": self.steps,
            "residuals": {key: residual.clone() for key, residual in self.errors.items()},
            "factors": {key: factor.clone() for key, factor in {**self.left, **self.right}.items()},
            "is_left": bool(self.left),
            "numel": [self.numel_before, self.numel_after],
            "generator": self.generator.state(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`PowerSGD.load_state_dict`."""
        _check_form(state_dict)
        place = {} if state_dict["rank"] is None else {key: state_dict[key] for key in ("rank", "ranks")}
        super().load_state_dict({"error": state_dict["residuals"], "generator": state_dict["generator"], **place})
        factors = {key: factor.clone() for key, factor in state_dict["factors"].items()}
        self.left, self.right = (factors, {}) if state_dict["is_left"] else ({}, factors)
        self.steps = int(state_dict["steps"])
        self.numel_before, self.numel_after = map(int, state_dict["numel"])


def _check_form(state: Any) -> None:
    """Raises: ConfigurationError: ``state`` is not one of PowerSGD."""
    if not isinstance(state, Mapping) or not set(state) >= _KEYS:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ConfigurationError(f"this is not a state of PowerSGD: {found}")


def redistribute(states: Sequence[Mapping[str, Any]], *, rank: int, ranks: int) -> dict[str, Any]:
    """The state of ``rank`` of ``ranks``, from the states of all old ranks, in any order.

    The mean over ranks of the residuals is still to be delivered, and stays the same: new rank ``r`` gets the sum of
    those of the old ranks ``r``, ``r + ranks``, ``r + 2 * ranks`` and so on, times new ranks over old ranks, or none.
    Generators start anew; all else is the same on all ranks.

    Raises:
        ConfigurationError: ``rank`` is out of range, a state is missing, or states do not belong together.
    """
    for state in states:
        _check_form(state)
    if len(steps := {state["steps"] for state in states}) > 1:
        raise ConfigurationError(f"states of different runs or steps, after {sorted(steps)} steps")
    residuals = summed_errors(states, "residuals", rank=rank, ranks=ranks, times=ranks / max(1, len(states)))
    return {**states[0], "residuals": residuals, "rank": rank, "ranks": ranks, "generator": None}
