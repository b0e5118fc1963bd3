"""The part of a rank's state that is its optimizer's, by the names of the model's parameters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from overlap.errors import ConfigurationError
from overlap.optim import FunctionalOptimizer, LocalSGD, OverlappedOptimizer, ZeroRedundancyOptimizer
from overlap.optim.packed_state import load_packed
from overlap.optim.proxy import OptimizerProxy
from overlap.optim.zero.other_ranks import joined, load_joined
from overlap.optim.zero.own_state import check_own_state, load_own_state, own_state

__all__ = [
    "check_optimizer_state",
    "inner_optimizer",
    "joined_optimizer_state",
    "load_optimizer_state",
    "optimizer_state",
]

State = dict[str, Any]
Names = Mapping[Tensor, str]


def inner_optimizer(optim: object) -> Any:
    """The optimizer of this library in ``optim``, if ``optim`` is a framework's wrapper of one; else ``optim``."""
    if isinstance(optim, FunctionalOptimizer):
        return optim.optimizer
    if isinstance(optim, OptimizerProxy):
        return optim
    inner = getattr(optim, "optimizer", None)
    if isinstance(inner, (ZeroRedundancyOptimizer, OptimizerProxy)):
        return inner
    if not hasattr(optim, "param_groups") or not hasattr(optim, "load_state_dict"):
        raise ConfigurationError(
            f"{optim!r} is not an optimizer: give the one whose step() the training loop calls, or the one that the "
            "registered stage steps"
        )
    return optim


def optimizer_state(optim: Any, names: Names) -> State:
    """What :func:`load_optimizer_state` takes."""
    state: State = {"class": _class_of(optim), "parameters": _labels(optim, names)}
    if isinstance(optim, ZeroRedundancyOptimizer):
        return {**state, "own": own_state(optim)}
    return {**state, "state": _without_stages(optim.state_dict())}


def joined_optimizer_state(optim: Any, names: Names, states: Sequence[Mapping[str, Any]]) -> State:
    """What :func:`load_optimizer_state` takes on any number of ranks, from what a ``ZeroRedundancyOptimizer`` has saved
    on each of another number.

    Raises:
        ConfigurationError: as :func:`check_optimizer_state`; or the states do not belong together.
    """
    _check_parameters(optim, names, states[0])
    order = _order(states[0]["parameters"], _labels(optim, names))
    own = {key: value for key, value in states[0].items() if key != "own"}
    return {**own, "joined": joined(optim, [state["own"] for state in states], order)}


def check_optimizer_state(optim: Any, names: Names, state: Mapping[str, Any]) -> None:
    """Raises: ConfigurationError: ``state`` is of another kind of optimizer, or of other parameters."""
    _check_parameters(optim, names, state)
    if isinstance(optim, ZeroRedundancyOptimizer) and "joined" not in state:
        check_own_state(optim, state["own"], _order(state["parameters"], _labels(optim, names)))


def _check_parameters(optim: Any, names: Names, state: Mapping[str, Any]) -> None:
    if state["class"] != _class_of(optim):
        raise ConfigurationError(
            f"the state is of an optimizer of class {state['class']}, but this one is a {_class_of(optim)}"
        )
    saved, here = state["parameters"], _labels(optim, names)
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


def load_optimizer_state(optim: Any, names: Names, state: Mapping[str, Any], stages: Mapping[str, Any] | None) -> None:
    """Load what :func:`optimizer_state` returned; ``stages`` is the state of the stages, which a LocalSGD loads."""
    if "joined" in state:
        load_joined(optim, state["joined"])
        return
    order = _order(state["parameters"], _labels(optim, names))
    if isinstance(optim, ZeroRedundancyOptimizer):
        load_own_state(optim, state["own"], order)
        return
    packed = dict(state["state"])
    if isinstance(optim, LocalSGD):
        packed["local_sgd"] = {**packed["local_sgd"], "stages": stages or {}}
    load_packed(optim, packed, order)


def _without_stages(state: Mapping[str, Any]) -> State:
    """What a LocalSGD saves of its stages is saved with the model's."""
    if "local_sgd" not in state:
        return dict(state)
    return {**state, "local_sgd": {**state["local_sgd"], "stages": {}}}


def _class_of(optim: Any) -> str:
    """The class of the optimizer that does the arithmetic, and what divides or averages it."""
    if isinstance(optim, ZeroRedundancyOptimizer):
        return f"ZeroRedundancyOptimizer({type(optim.optim).__name__})"
    if isinstance(optim, OptimizerProxy):
        inner_class = _class_of(optim.optimizer)
        # The same state whether the update is made in backward or after it.
        is_same = isinstance(optim, OverlappedOptimizer)
        return inner_class if is_same else f"{type(optim).__name__}({inner_class})"
    inner = getattr(optim, "optimizer", None)
    return _class_of(inner) if isinstance(inner, Optimizer) else type(optim).__name__


def _labels(optim: Any, names: Names) -> list[list[str]]:
    """Of each group, the names of its parameters; of those outside of the model, their shapes."""
    return [
        [names.get(parameter) or f"outside of the model: {tuple(parameter.shape)}" for parameter in group["params"]]
        for group in optim.param_groups
    ]


def _order(saved: Sequence[Sequence[str]], here: Sequence[Sequence[str]]) -> list[list[int]]:
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
