"""The state of local SGD on one number of ranks for another number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from overlap.errors import ConfigurationError
from overlap.hooks import wires

__all__ = ["redistribute"]


def redistribute(states: Sequence[Mapping[str, Any]], *, rank: int, ranks: int) -> dict[str, Any]:
    """The ``LocalSGD.state_dict()`` of ``rank`` of ``ranks``, from those of another number of ranks.

    They must have been saved after ``local.synchronize()``, when ranks have one model. What a wire left out is part of
    the next mean, so its sum over ranks stays the same: new rank ``r`` gets the sum of that of the old ranks ``r``,
    ``r + ranks`` and so on, or none. The optimizer's state is that of old rank ``r`` modulo their number. Generators
    start anew.

    Args:
        states: of all old ranks, in their order.
        rank: this rank in the new group.
        ranks: size of the new group.

    Raises:
        ConfigurationError: ``rank`` is out of range, a state is missing or was saved in the middle of a round, or
            states do not belong together.
    """
    if not states:
        raise ConfigurationError("redistribute needs the state of every old rank, and was given none")
    for old, state in enumerate(states):
        local = state["local_sgd"]
        if local["flight"] is not None or any(any(levels) for levels in local["own_steps"]):
            raise ConfigurationError(
                f"the state of old rank {old} was saved in the middle of a round, when ranks have different models: "
                "resume once with as many ranks as before, and call local.synchronize() before saving"
            )
    base = states[rank % len(states)]
    own = [state["local_sgd"].get("wire") for state in states]
    if all(wire is None for wire in own):
        return dict(base)
    if any(wire is None for wire in own):
        raise ConfigurationError("some of the states are of runs with a wire, and others without: they are of two runs")
    made = wires.redistribute(own, rank=rank, ranks=ranks)
    return {**base, "local_sgd": {**base["local_sgd"], "wire": made}}
