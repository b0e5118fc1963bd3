"""Hyperparameters of optimizers, which a rank that has run out of inputs must have as the others have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from overlap._torch.optimizer import all_of, is_scheduled
from overlap.errors import TrainingLoopError

__all__ = ["Hyperparameters"]

# What LR schedulers change.
_SCHEDULED = ("lr", "momentum", "betas", "weight_decay")
_OF_PARAMETERS = ("params", "param_names")

Groups = list[dict[str, Any]]


class Hyperparameters:
    """Those of the optimizers under a Join.

    A rank that has run out of inputs steps with its own, and after the block each rank does. So what the loop has set
    by hand is taken over, and what a scheduler has set that is not given to the Join, and so did not step here, is an
    error: the ranks would part.

    Args:
        optimizers: under the Join.
        schedulers: under the Join, too: they step on every rank.
    """

    def __init__(self, optimizers: Sequence[Optimizer], schedulers: Sequence[LRScheduler] = ()) -> None:
        self._optimizers = optimizers
        self._followed = {id(one) for scheduler in schedulers for one in all_of(scheduler.optimizer)}

    def told(self) -> list[Groups]:
        """For each optimizer and group, in values that JSON can hold."""
        return [[_plain(group) for group in optimizer.param_groups] for optimizer in self._optimizers]

    def follow(self, told: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Take over what another rank :meth:`told`.

        Raises:
            TrainingLoopError: a scheduler of that rank has stepped, and the one here has not; or it has other groups.
        """
        for optimizer, groups in zip(self._optimizers, told, strict=True):
            if len(groups) != len(optimizer.param_groups):
                raise TrainingLoopError(
                    f"{type(optimizer).__name__} has {len(optimizer.param_groups)} groups on this rank and "
                    f"{len(groups)} on another, since ranks that have run out of inputs do not follow "
                    "add_param_group(): call it before the block"
                )
            for group, others in zip(optimizer.param_groups, groups, strict=True):
                own = _plain(group)
                for key, value in others.items():
                    if key in own and _differ(own[key], value):
                        self._check_unscheduled(optimizer, key, own[key], value)
                        _set(group, key, value)

    def _check_unscheduled(self, optimizer: Optimizer, key: str, own: Any, others: Any) -> None:
        if key not in _SCHEDULED or not is_scheduled(optimizer):
            return
        if any(id(one) in self._followed for one in all_of(optimizer)):
            return
        raise TrainingLoopError(
            f"{key} of {type(optimizer).__name__} is {own} on this rank and {others} on another, since its scheduler "
            "did not step on ranks that had run out of inputs: give every scheduler of an optimizer that is given to "
            "Join to it, too, as in Join([ddp, optimizer, scheduler])"
        )


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: value for key, value in group.items() if key not in _OF_PARAMETERS and _is_readable(value)}
    return {key: _as_json(value) for key, value in values.items()}


def _is_readable(value: Any) -> bool:
    """Whether JSON can hold it. To read a tensor on a device would stop the host."""
    if isinstance(value, Tensor):
        return value.device.type == "cpu" and value.numel() == 1
    if isinstance(value, (tuple, list)):
        return all(_is_readable(each) for each in value)
    return value is None or isinstance(value, (bool, int, float, str)) or _is_number_of_numpy(value)


def _is_number_of_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 and hasattr(value, "item")


def _as_json(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_as_json(each) for each in value]
    return value.item() if isinstance(value, Tensor) or _is_number_of_numpy(value) else value


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return any(_differ(mine, its) for mine, its in zip(one, other, strict=True))
    return bool(one != other) and not (one != one and other != other)  # Not a number is the same as not a number.


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    own = group[key]
    if isinstance(own, Tensor):
        own.fill_(value)
    elif isinstance(value, list):
        group[key] = type(own)(value) if isinstance(own, (tuple, list)) else tuple(value)
    else:
        group[key] = value
