"""Whether a state is this rank's, of this model, with these stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from overlap.errors import ConfigurationError
from overlap.hooks import Stage
from overlap.hooks.stage import walk

__all__ = ["VERSION", "check_form", "check_model", "check_place", "check_stages", "classes_of"]

VERSION = 1
_KEYS = {"version", "rank", "ranks", "model", "optimizer", "stages"}


def classes_of(stage: Stage) -> list[str]:
    """The classes of a stage and of all that it is made of."""
    return [type(one).__name__ for one in walk(stage)]


def check_form(state: object) -> None:
    """Raises: ConfigurationError: ``state`` is something else than ``overlap.state_dict`` returns."""
    if not isinstance(state, Mapping) or set(state) != _KEYS or state["version"] != VERSION:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ConfigurationError(
            f"this is not what overlap.state_dict(ddp, optim) returns (version {VERSION}): {found}"
        )


def check_place(group: dist.ProcessGroup, state: Mapping[str, Any]) -> None:
    """Raises: ConfigurationError: another rank has saved ``state``."""
    if (state["rank"], state["ranks"]) != (group.rank(), group.size()):
        raise ConfigurationError(
            f"the state was saved by rank {state['rank']} of {state['ranks']}, but this is rank {group.rank()} of "
            f"{group.size()}: each rank loads its own, or, if the number of ranks has changed, the list of all"
        )


def check_model(here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises: ConfigurationError: names, shapes or dtypes differ."""
    missing, added = sorted(set(here) - set(saved)), sorted(set(saved) - set(here))
    if missing or added:
        raise ConfigurationError(
            f"the state is another model's: it lacks {missing[:3] or 'nothing'}{', ...' if len(missing) > 3 else ''} "
            f"and adds {added[:3] or 'nothing'}{', ...' if len(added) > 3 else ''}"
        )
    for name, value in here.items():
        if isinstance(value, Tensor) and (value.shape, value.dtype) != (saved[name].shape, saved[name].dtype):
            raise ConfigurationError(
                f"the state is another model's: {name} is {tuple(saved[name].shape)} {saved[name].dtype} in it, and "
                f"{tuple(value.shape)} {value.dtype} here"
            )


def check_stages(stage: Stage | None, saved: Mapping[str, Any] | None) -> None:
    """Raises: ConfigurationError: other stages were registered."""
    here = None if stage is None else classes_of(stage)
    then = None if saved is None else saved["classes"]
    if here != then:
        raise ConfigurationError(
            f"the state was saved with {_told(then)} registered, and here {_told(here)} is: register the same stages "
            "before load_state_dict"
        )


def _told(classes: list[str] | None) -> str:
    return "no stage" if classes is None else " > ".join(classes)
