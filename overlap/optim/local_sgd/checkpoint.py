"""Saving and loading local SGD in the middle of a round, exactly."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from overlap.errors import ConfigurationError
from overlap.optim.local_sgd.flight import Flight

if TYPE_CHECKING:
    from overlap.optim.local_sgd.controller import LocalSGD

__all__ = ["KEY", "load", "save"]

KEY = "local_sgd"


def save(local: LocalSGD) -> dict[str, Any]:
    """All but the optimizer's own state: tensors and plain values by name; waits for an average in flight."""
    schedule = local.schedule
    return {
        "step": schedule.step,
        "round_end": schedule.round_end,
        "rounds": local.rounds,
        "own_steps": [list(levels) for levels in local.own_steps],
        "outer": None if local.outer_step is None else local.outer_step.state_dict(),
        "flight": None if local.flight is None else local.flight.state_dict(),
        "stages": local.registration.stage.state_dict(),
    }


def load(local: LocalSGD, state: Mapping[str, Any] | None) -> None:
    """Take over what :func:`save` gave.

    Raises:
        ConfigurationError: it is of other settings, or of another model.
    """
    if local.flight is not None:
        local.flight.wait()
        local.flight = None
    schedule = local.schedule
    if state is None:
        warnings.warn(
            "the state has no step of local SGD: it starts again from step 0, its start_step included",
            UserWarning,
            stacklevel=3,
        )
        schedule.step, schedule.round_end, local.rounds = 0, None, 0
        local.own_steps = [[0] * len(levels) for levels in local.own_steps]
        if local.outer_step is not None:
            local.outer_step.restart()
        return
    if [len(levels) for levels in state["own_steps"]] != [len(levels) for levels in local.own_steps]:
        raise ConfigurationError("the state is of local SGD with another number of fragments or of levels")
    if (state["outer"] is None) != (local.outer_step is None):
        has = "without" if local.outer_step is None else "with"
        raise ConfigurationError(f"this LocalSGD is {has} an outer optimizer, and the state is of the other kind")
    schedule.step, schedule.round_end, local.rounds = state["step"], state["round_end"], state["rounds"]
    local.own_steps = [list(levels) for levels in state["own_steps"]]
    local.registration.stage.load_state_dict(state["stages"])
    if local.outer_step is not None:
        local.outer_step.load_state_dict(state["outer"])
    if state["flight"] is not None:
        unit = state["flight"]["unit"]
        tensors = {**local.content.parameters_of(unit), **local.content.others_of(unit)}
        local.flight = Flight.restored(state["flight"], tensors, site=local.site, dtype=local.options.average_dtype)
