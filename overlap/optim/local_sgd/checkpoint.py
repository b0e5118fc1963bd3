"""Saving and loading local SGD in the middle of a round, exactly."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from overlap.errors import ConfigurationError
from overlap.hooks import Stage, StageContext
from overlap.optim.local_sgd.averages import Averages
from overlap.optim.local_sgd.flight import Flight

__all__ = ["KEY", "load", "save"]

KEY = "local_sgd"


def save(averages: Averages, stage: Stage) -> dict[str, Any]:
    """All but the optimizer's own state: tensors and plain values by name; waits for an average in flight."""
    schedule = averages.schedule
    return {
        "step": schedule.step,
        "round_end": schedule.round_end,
        "rounds": averages.count,
        "own_steps": [list(levels) for levels in averages.own_steps],
        "outer": None if averages.outer is None else averages.outer.state_dict(),
        "flight": None if averages.flight is None else averages.flight.state_dict(),
        "stages": stage.state_dict(),
    }


def load(averages: Averages, stage: Stage, context: StageContext, state: Mapping[str, Any] | None) -> None:
    """Take over what :func:`save` gave.

    Raises:
        ConfigurationError: it is of other settings, or of another model.
    """
    if averages.flight is not None:
        averages.flight.wait()
        averages.flight = None
    if state is None:
        warnings.warn(
            "the state has no step of local SGD: it starts again from step 0, its start_step included",
            UserWarning,
            stacklevel=3,
        )
        averages.restart()
        return
    if [len(levels) for levels in state["own_steps"]] != [len(levels) for levels in averages.own_steps]:
        raise ConfigurationError("the state is of local SGD with another number of fragments or of levels")
    if (state["outer"] is None) != (averages.outer is None):
        has = "without" if averages.outer is None else "with"
        raise ConfigurationError(f"this LocalSGD is {has} an outer optimizer, and the state is of the other kind")
    schedule = averages.schedule
    schedule.step, schedule.round_end, averages.count = state["step"], state["round_end"], state["rounds"]
    averages.own_steps = [list(levels) for levels in state["own_steps"]]
    stage.load_state_dict(state["stages"])
    if averages.outer is not None:
        averages.outer.load_state_dict(state["outer"])
    if state["flight"] is not None:
        unit = state["flight"]["unit"]
        tensors = {**averages.content.parameters_of(unit), **averages.content.others_of(unit)}
        averages.flight = Flight.restored(
            state["flight"], tensors, context=context, dtype=averages.options.average_dtype
        )
