"""The states of all ranks for another number of ranks, and an optimizer's parameters in another order.

Each part of a state has one rule; see docs/resuming.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from overlap.errors import ConfigurationError
from overlap.hooks import Stage
from overlap.hooks.stage import is_same_state, redistributed
from overlap.optim import LocalSGD, OverlappedOptimizer, ZeroRedundancyOptimizer
from overlap.optim.optimizer import OptimizerProxy
from overlap.optim.zero.checkpoint import merged

__all__ = ["check_parameters", "class_of", "in_order", "labels_of", "order_of", "redistribute"]

State = Mapping[str, Any]
Names = Mapping[Tensor, str]


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


def _optimizers(saved: Sequence[Any], rank: int, ranks: int, optimizers: Sequence[Any], names: Names) -> Any:
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
            base = _divided(optimizer, names, states)
        elif isinstance(optimizer, LocalSGD) and "local_sgd" in base["state"]:
            own = [state["state"] for state in states]
            base = {**base, "state": LocalSGD.redistribute(own, rank=rank, ranks=ranks)}
        made.append(base)
    return made if isinstance(saved[0], (list, tuple)) else made[0]


def _divided(optim: Any, names: Names, states: Sequence[State]) -> dict[str, Any]:
    """The state of a ``ZeroRedundancyOptimizer`` on this rank, from those of all old ranks.

    Raises:
        ConfigurationError: as :func:`check_parameters`; or the states do not belong together.
    """
    check_parameters(optim, names, states[0])
    return {**states[0], "own": merged([state["own"] for state in states])}


def _check_alike(models: Sequence[State], names: Names) -> None:
    """Raises: ConfigurationError: a parameter differs between ranks."""
    for rank, model in enumerate(models):
        for name in names.values():
            if not is_same_state(model.get(name), models[0].get(name)):
                raise ConfigurationError(
                    f"the old ranks had different models: {name} of rank {rank} is not that of rank 0. The states are "
                    "of different checkpoints, or were saved while ranks train apart: save where they have just "
                    "averaged, or resume with as many ranks as before"
                )


def check_parameters(optim: Any, names: Names, state: State) -> None:
    """Raises: ConfigurationError: ``state`` is of another kind of optimizer, or of other parameters."""
    if state["class"] != class_of(optim):
        raise ConfigurationError(
            f"the state is of an optimizer of class {state['class']}, but this one is a {class_of(optim)}"
        )
    saved, here = state["parameters"], labels_of(optim, names)
    if [sorted(labels) for labels in saved] != [sorted(labels) for labels in here]:
        raise ConfigurationError(
            f"the optimizer's state is of other parameters or groups: {_difference(saved, here)}; make the same groups "
            "of the same parameters as in the run that was saved"
        )
    if saved != here and any(len(set(labels)) < len(labels) for labels in here):
        raise ConfigurationError(
            "the optimizer has parameters outside of the model, in another order than in the run that was saved, and "
            "they have no names to tell them apart: pass them in the same order"
        )


def class_of(optim: Any) -> str:
    """The class of the optimizer that does the arithmetic, and what divides or averages it."""
    if isinstance(optim, ZeroRedundancyOptimizer):
        return f"ZeroRedundancyOptimizer({type(optim.optim).__name__})"
    if isinstance(optim, OptimizerProxy):
        inner_class = class_of(optim.optimizer)
        # The same state whether the update is made in backward or after it.
        is_same = isinstance(optim, OverlappedOptimizer)
        return inner_class if is_same else f"{type(optim).__name__}({inner_class})"
    inner = getattr(optim, "optimizer", None)
    return class_of(inner) if isinstance(inner, Optimizer) else type(optim).__name__


def labels_of(optim: Any, names: Names) -> list[list[str]]:
    """Of each group, the names of its parameters; of those outside of the model, their shapes."""
    return [
        [names.get(parameter) or f"outside of the model: {tuple(parameter.shape)}" for parameter in group["params"]]
        for group in optim.param_groups
    ]


def order_of(saved: Sequence[Sequence[str]], here: Sequence[Sequence[str]]) -> list[list[int]]:
    """For each group and each parameter of it, its place in the group that was saved."""
    if saved == here:
        return [list(range(len(labels))) for labels in here]
    return [[labels.index(label) for label in own] for labels, own in zip(saved, here, strict=True)]


def _difference(saved: Sequence[Sequence[str]], here: Sequence[Sequence[str]]) -> str:
    for place, (labels, own) in enumerate(itertools.zip_longest(saved, here)):
        if labels is None or own is None:
            break
        missing, added = sorted(set(labels) - set(own)), sorted(set(own) - set(labels))
        if missing or added or len(labels) != len(own):
            changes = _told(missing, ", lacks ") + _told(added, ", adds ")
            return f"group {place} had {len(labels)} parameters and has {len(own)}{changes}"
    return f"{len(saved)} groups were saved, and there are {len(here)}"


def _told(names: Sequence[str], how: str) -> str:
    return f"{how}{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else ""
