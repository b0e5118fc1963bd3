"""The states of all ranks of a run, for another number of ranks: by one rule for each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from overlap.errors import ConfigurationError
from overlap.hooks import Stage
from overlap.hooks.same_state import is_same_state
from overlap.hooks.stage import redistributed
from overlap.optim import LocalSGD
from overlap.resume.optimizers import joined_optimizer_state

__all__ = ["in_order", "redistribute"]

State = Mapping[str, Any]


def in_order(states: Sequence[State]) -> list[State]:
    """The states of one run by the rank that saved each.

    Raises:
        ConfigurationError: they are not those of all its ranks, each once.
    """
    ranks = [state["rank"] for state in states]
    sizes = sorted({state["ranks"] for state in states})
    if sizes != [len(states)] or sorted(ranks) != list(range(len(states))):
        raise ConfigurationError(
            f"these are the states of ranks {ranks} of {', '.join(map(str, sizes)) or 'none'}: give those of all ranks "
            "of one run, each once"
        )
    return sorted(states, key=lambda state: int(state["rank"]))


def redistribute(
    states: Sequence[State], *, rank: int, ranks: int, stage: Stage | None, optimizers: Sequence[Any], names: Any
) -> dict[str, Any]:
    """The state of ``rank`` of ``ranks``, from those of another number of ranks.

    Parameters are the same on all old ranks. Of what differs, buffers and the state of a plain optimizer, the inner one
    of a ``LocalSGD`` too, are those of old rank ``r`` modulo their number; that of a ``ZeroRedundancyOptimizer`` is put
    together; stages have rules of their own, :meth:`Stage.redistribute`.

    Args:
        states: of the old ranks, in order; parts that are missing are left out.
        rank: this rank in the new group.
        ranks: size of the new group.
        stage: the one that is registered.
        optimizers: those that are going to load it.
        names: of the model's parameters.

    Raises:
        ConfigurationError: the states do not belong together, or were saved where ranks have different models.
    """
    made = {**states[rank % len(states)], "rank": rank, "ranks": ranks}
    if made.get("optimizer") is not None:
        made["optimizer"] = _optimizers([state["optimizer"] for state in states], rank, ranks, optimizers, names)
    if made.get("stages") is not None and stage is not None:
        of_ranks = [state["stages"] for state in states]
        classes = [of_rank["classes"] for of_rank in of_ranks]
        if classes.count(classes[0]) < len(classes):
            raise ConfigurationError(f"the states are of runs with different stages, by rank {classes}")
        memories = [of_rank["state"] for of_rank in of_ranks]
        made["stages"] = {**of_ranks[0], "state": redistributed(stage, memories, rank=rank, ranks=ranks)}
    if "model" in made:
        _check_alike([state["model"] for state in states], names)
    return made


def _optimizers(
    saved: Sequence[Any], rank: int, ranks: int, optimizers: Sequence[Any], names: Mapping[Tensor, str]
) -> Any:
    of_ranks = [list(one) if isinstance(one, (list, tuple)) else [one] for one in saved]
    if any(len(one) != len(optimizers) for one in of_ranks):
        return saved[rank % len(saved)]  # Which load_state_dict refuses.
    made = []
    for place, optimizer in enumerate(optimizers):
        states = [one[place] for one in of_ranks]
        base = states[rank % len(states)]
        if any((state["class"], state["parameters"]) != (base["class"], base["parameters"]) for state in states):
            raise ConfigurationError(f"the states are of runs with different optimizers, {base['class']} among them")
        if "own" in base:
            base = joined_optimizer_state(optimizer, names, states)
        elif isinstance(optimizer, LocalSGD) and "local_sgd" in base["state"]:
            own = [state["state"] for state in states]
            base = {**base, "state": LocalSGD.redistribute(own, rank=rank, ranks=ranks)}
        made.append(base)
    return made if isinstance(saved[0], (list, tuple)) else made[0]


def _check_alike(models: Sequence[State], names: Mapping[Tensor, str]) -> None:
    """Raises: ConfigurationError: a parameter differs between ranks."""
    for rank, model in enumerate(models):
        for name in names.values():
            if not is_same_state(model.get(name), models[0].get(name)):
                raise ConfigurationError(
                    f"the old ranks had different models: {name} of rank {rank} is not that of rank 0. The states are "
                    "of different checkpoints, or were saved while ranks train apart: save where they have just "
                    "averaged, or resume with as many ranks as before"
                )
