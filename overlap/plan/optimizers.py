"""What an optimizer rules out, and its sharded counterpart."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from overlap._torch.optimizer import hook_attributes
from overlap.errors import UnsupportedError
from overlap.optim import ZeroRedundancyOptimizer
from overlap.optim.declared import check_nothing_before, check_one_eps, unit_of

__all__ = ["backward_obstacle", "sharded", "sharding_obstacle"]

# What a new optimizer is given, or has none of.
_GIVEN = {"defaults", "param_groups", "state", *hook_attributes}


def backward_obstacle(optimizer: Optimizer) -> str | None:
    """Why ``optimizer`` cannot update while backward runs: it is not known, or something must come before."""
    if (why := _unknown(optimizer)) is not None:
        return why
    try:
        check_nothing_before(optimizer)
        check_one_eps(optimizer, instead="deferred=True")
    except UnsupportedError as error:
        return str(error)
    return None


def sharding_obstacle(optimizer: Optimizer) -> str | None:
    """Why the state of ``optimizer`` cannot be sharded: it is not known, or there cannot be another one, made anew."""
    if (why := _unknown(optimizer)) is not None:
        return why
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        return "a learning rate scheduler holds the optimizer: make it after auto(), with what that returns"
    if optimizer.state:
        return "the optimizer has state already: choose before the first step"
    if any(getattr(optimizer, name, None) for name in hook_attributes):
        return "the optimizer has hooks: register them after auto(), with what that returns"
    try:
        again = type(optimizer)([dict(group) for group in optimizer.param_groups], **_arguments(optimizer))
    except Exception as error:
        return f"{type(optimizer).__name__} cannot be made anew from its groups ({type(error).__name__}: {error})"
    for name, value in vars(optimizer).items():
        if name not in _GIVEN and not _same(value, vars(again).get(name)):
            return f"{type(optimizer).__name__} keeps {name!r}, which one made anew from its groups would not have"
    return None


def sharded(optimizer: Optimizer, group: dist.ProcessGroup) -> ZeroRedundancyOptimizer:
    """A sharded optimizer with the groups and the hyperparameters of ``optimizer``.

    Raises:
        UnsupportedError: it would not be the same.
    """
    if (why := sharding_obstacle(optimizer)) is not None:
        raise UnsupportedError(why)
    return ZeroRedundancyOptimizer.from_optimizer(optimizer, process_group=group, overlap_with_ddp=True)


def _unknown(optimizer: Optimizer) -> str | None:
    name = type(optimizer).__name__
    return None if unit_of(optimizer) else f"{name} is neither known nor declared; see overlap.declare({name}, ...)"


def _arguments(optimizer: Optimizer) -> dict[str, Any]:
    accepted = inspect.signature(type(optimizer).__init__).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in accepted}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    try:
        return one is other or bool(one == other)
    except Exception:
        return False
