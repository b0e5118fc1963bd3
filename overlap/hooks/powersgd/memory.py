"""PowerSGD's memory: the errors of any stage that rounds, here called residuals, plus factors and counters. When it is
committed is in ``hooks/wires/feedback.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from overlap._torch.device import hold_all
from overlap.errors import ConfigurationError
from overlap.hooks.bucket import Bucket
from overlap.hooks.stage import StageContext
from overlap.hooks.states import StatesOfRanks, alike_in, copied
from overlap.hooks.wires import StageMemory, Wire
from overlap.hooks.wires.feedback import check_shape, summed_errors

Side = Literal["left", "right"]
_KEYS = {"rank", "ranks", "steps", "residuals", "factors", "is_left", "numel", "generator"}


class Memory(StageMemory):
    """The memory of one rank for one model, by parameter name, so that it does not depend on buckets.

    The name is the fully qualified one. Where only a hook is registered, names are not known; parameters are then
    numbered in the order in which their gradients first arrive, which depends on the model alone.
    """

    def __init__(self, owner: object, *, wire: Wire | None) -> None:
        super().__init__(owner, error_feedback=True, wire=wire)
        # Backward passes, without those that were discarded; elements of all compressed ones, before and after that.
        self.counts = {"steps": 0, "before": 0, "after": 0}
        self._committed_counts = dict(self.counts)
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

    # Beside the errors: the mean factors of the last pass, the same on every rank. Left ones are ``(rank, rows)``,
    # right ones ``(rank, cols)``, with columns in the order of the gradient's memory. A parameter has one of the two:
    # only where factors alternate is it ever the left one.

    def put_factors(self, keys: Sequence[str], side: Side, factors: Sequence[Tensor]) -> None:
        """Put new factors, in place of those of either side."""
        self.put(keys, factors, side)
        self.drop(keys, "right" if side == "left" else "left")

    def residuals(self, keys: Sequence[str], gradients: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor | None]:
        """The residuals of parameters in the memory format of their ``gradients``, not to be changed; ``None`` where
        there is none.

        Raises:
            ConfigurationError: one was loaded for a parameter of another shape.
        """
        residuals = [self.get(key) for key in keys]
        hold_all([found for found in residuals if found is not None])
        for place, (key, found, gradient) in enumerate(zip(keys, residuals, gradients, strict=True)):
            if found is None:
                continue
            check_shape(f"parameter {key}", found, gradient)
            if (found.stride(), found.dtype, found.device) != (gradient.stride(), dtype, gradient.device):
                like = torch.empty_like(gradient, dtype=dtype, memory_format=torch.preserve_format)
                residuals[place] = like.copy_(found)
        return residuals

    def release(self, keys: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """Add the residuals of parameters that are no longer compressed, as after loading with another rank."""
        kinds = ("error", "left", "right")
        if self.has_any({(kind, key) for kind in kinds for key in keys}):
            self.add_errors(keys, gradients)
            for kind in kinds:
                self.drop(keys, kind)

    def count(self, before: int, after: int) -> None:
        """A bucket is compressed, from ``before`` elements to ``after``."""
        self.counts["before"] += before
        self.counts["after"] += after

    def compression_stats(self) -> tuple[float, int, int]:
        """The ratio of elements before and after compression (0 before any was sent), and both numbers."""
        before, after = self.counts["before"], self.counts["after"]
        return before / max(1, after), before, after

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`PowerSGD.state_dict`."""
        rank, ranks = self.place or (None, None)
        left, right, is_committed = self.values("left"), self.values("right"), self._learns_of_steps
        steps, *numel = (self._committed_counts if is_committed else self.counts).values()
        return {
            "rank": rank,
            "ranks": ranks,
            "steps": steps,
            "residuals": {key: copied(residual) for key, residual in self.values().items()},
            "factors": {key: copied(factor) for key, factor in {**left, **right}.items()},
            "is_left": bool(left),
            "numel": numel,
            "generator": self.generator.state(is_committed=is_committed),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See :meth:`PowerSGD.load_state_dict`."""
        _check_form(state_dict)
        place = {} if state_dict["rank"] is None else {key: state_dict[key] for key in ("rank", "ranks")}
        super().load_state_dict({"error": state_dict["residuals"], "generator": state_dict["generator"], **place})
        side = "left" if state_dict["is_left"] else "right"
        self._committed.update({(side, key): factor.clone() for key, factor in state_dict["factors"].items()})
        before, after = map(int, state_dict["numel"])
        self.counts = {"steps": int(state_dict["steps"]), "before": before, "after": after}
        self._committed_counts = dict(self.counts)


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
    if not isinstance(states, StatesOfRanks):
        for state in states:
            _check_form(state)
        if len(steps := {state["steps"] for state in states}) > 1:
            raise ConfigurationError(f"states of different runs or steps, after {sorted(steps)} steps")
    residuals = summed_errors(states, "residuals", rank=rank, ranks=ranks, times=ranks / max(1, len(states)))
    alike = alike_in(states, rank, but=("residuals", "generator"))
    return {**alike, "residuals": residuals, "rank": rank, "ranks": ranks, "generator": None}
