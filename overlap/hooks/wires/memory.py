"""What a stage that sends through wires remembers on its rank: errors and the rounding's generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from overlap.errors import ConfigurationError
from overlap.hooks.context import StageContext
from overlap.hooks.stage import Stage
from overlap.hooks.wires.feedback import ErrorFeedback, RoundingGenerator, check_errors
from overlap.hooks.wires.wire import Wire

__all__ = ["WireMemory"]

_KEYS = {"error", "generator", "rank", "ranks"}


class WireMemory:
    """The memory of one stage, which may be loaded before the stage is registered.

    Args:
        owner: the stage, which messages name.
        error_feedback: whether the stage adds what a step left out to the next step's values.
        wires: those of the stage, at least one; stochastic ones draw from one generator.
    """

    def __init__(self, owner: Stage, *, error_feedback: bool, wires: Sequence[Wire]) -> None:
        self._owner = owner
        self.feedback = ErrorFeedback() if error_feedback else None
        stochastic = [wire for wire in wires if wire.is_stochastic]
        self._is_stochastic = bool(stochastic)
        self._generator = RoundingGenerator([*stochastic, *wires][0])
        self._saved_by: tuple[int, int] | None = None
        self._context: StageContext | None = None

    def attach(self, context: StageContext) -> None:
        """Serve the model of ``context``.

        Raises:
            ConfigurationError: what was loaded is another rank's or another model's.
        """
        self._check(context, self._saved_by, {} if self.feedback is None else self.feedback.errors)
        self._context = context

    def detach(self) -> None:
        """Stop serving the model; what is remembered stays."""
        has_own = self._generator.state() is not None or (self.feedback is not None and self.feedback.errors)
        if self._context is not None and has_own:
            self._saved_by = _place(self._context)
        self._context = None

    def begin(self) -> None:
        """A pass begins."""
        if self.feedback is not None:
            self.feedback.begin()

    def settle(self, *, failed: bool) -> None:
        """The pass is over; see :meth:`ErrorFeedback.settle`."""
        if self.feedback is not None:
            self.feedback.settle(failed=failed)

    def generator_for(self, wire: Wire, rank: int, device: torch.device) -> torch.Generator | None:
        """What ``wire`` rounds with on this ``rank``; ``None`` if it rounds to nearest."""
        return self._generator.of(rank, device) if wire.is_stochastic else None

    def state_dict(self) -> dict[str, Any]:
        """A snapshot of this rank's memory; empty before the first pass.

        ``error`` by parameter's name, the rounding's ``generator``, and the ``rank`` and number of ``ranks`` that it
        belongs to.
        """
        state: dict[str, Any] = {}
        if self.feedback is not None:
            state["error"] = self.feedback.state_dict()
        if (generator := self._generator.state()) is not None:
            state["generator"] = generator
        saved_by = self._saved_by if self._context is None else _place(self._context)
        if state and saved_by is not None:
            state["rank"], state["ranks"] = saved_by
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned on this rank.

        Raises:
            ConfigurationError: ``state_dict`` has unknown keys, has errors and this memory keeps none, or is another
                model's or another rank's.
        """
        if unknown := sorted(set(state_dict) - _KEYS):
            raise ConfigurationError(f"{self._owner!r} has no state {unknown}")
        errors = state_dict.get("error", {})
        if self.feedback is None and errors:
            raise ConfigurationError(
                f"the state has error feedback, but {self._owner!r} has none: make it with error_feedback=True"
            )
        saved_by = (state_dict["rank"], state_dict["ranks"]) if {"rank", "ranks"} <= set(state_dict) else None
        if self._context is not None:
            self._check(self._context, saved_by, errors)
        self._saved_by = saved_by
        if self.feedback is not None:
            self.feedback.load_state_dict(errors)
        self._generator.load(state_dict.get("generator"))

    def _check(self, context: StageContext, saved_by: tuple[int, int] | None, errors: Mapping[str, Tensor]) -> None:
        here = _place(context)
        is_own = self.feedback is not None or self._is_stochastic
        if saved_by is not None and saved_by != here and is_own:
            raise ConfigurationError(
                f"the state was saved by rank {saved_by[0]} of {saved_by[1]}, but this is rank {here[0]} of {here[1]}, "
                "and each rank has its own errors: load this rank's file, or make its state with "
                f"{type(self._owner).__name__}.redistribute(states, rank={here[0]}, ranks={here[1]})"
            )
        if context.names is not None:
            check_errors(errors, {name: parameter for parameter, name in context.names.items()})


def _place(context: StageContext) -> tuple[int, int]:
    return context.group.rank(), context.group.size()
