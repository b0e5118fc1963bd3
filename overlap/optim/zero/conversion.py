"""The parts of an optimizer, beside its state, that :meth:`ZeroRedundancyOptimizer.from_optimizer` takes over."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import described
from overlap._torch import classes
from overlap._torch.optimizer import hook_attributes, is_scheduled, own_step, unwrapped
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks.stage import is_same_state
from overlap.join.group_collectives import of_all_ranks
from overlap.optim.optimizer import OptimizerProxy
from overlap.optim.packed_state import fingerprint
from overlap.optim.zero.partition import names_of, options_of

__all__ = ["check_convertible", "check_same_optimizer", "constructor_arguments", "copy_attributes"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes)

# Attributes of every optimizer; the groups and the state are taken over by themselves.
_OF_EVERY_OPTIMIZER = frozenset(
    {"defaults", "param_groups", "state", "_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name"}
    | {*hook_attributes}
)


def check_convertible(optimizer: object) -> Optimizer:
    """``optimizer`` itself, or the one that Accelerate or Lightning have wrapped.

    Raises:
        ConfigurationError: it is not a plain optimizer.
        UnsupportedError: something is attached to it that would be lost.
    """
    plain = unwrapped(optimizer)
    if isinstance(plain, classes.ZeroRedundancyOptimizer):
        raise ConfigurationError("from_optimizer was given a ZeroRedundancyOptimizer, which is sharded already: use it")
    if isinstance(plain, OptimizerProxy) or not isinstance(plain, Optimizer):
        inner = getattr(plain, "optimizer", None)
        remedy = "pass an object such as torch.optim.AdamW(ddp.parameters())"
        if isinstance(plain, type) and issubclass(plain, Optimizer):
            remedy = f"use ZeroRedundancyOptimizer(ddp.parameters(), {plain.__name__}) for a class"
        elif isinstance(inner, Optimizer):
            remedy = f"remove its registration, and pass the {type(inner).__name__} in it, which is its .optimizer"
        raise ConfigurationError(f"from_optimizer takes a plain optimizer, got {described(plain)}: {remedy}")
    name = type(plain).__name__
    for attribute in hook_attributes:
        for hook in getattr(plain, attribute, {}).values():
            kind = attribute.removeprefix("_optimizer_").removesuffix("s")
            raise UnsupportedError(
                f"this {name} has a {kind}, {getattr(hook, '__qualname__', hook)}, which would be lost: remove it, and "
                f"register it with the new optimizer, zero.register_{kind}(...)"
            )
    if is_scheduled(plain):
        raise UnsupportedError(
            f"a learning rate scheduler was made for this {name}, and would change its groups alone: convert first, "
            "then make the scheduler of the new optimizer, and load the state of the old one into it"
        )
    if own_step(plain) is not None:
        raise UnsupportedError(
            f"step() of this {name} was replaced on the object, which a sharded update would not call: convert it "
            "before, or use chain(AllReduce(), Step(OverlappedOptimizer(optimizer), deferred=True))"
        )
    return plain


def constructor_arguments(optimizer: Optimizer) -> dict[str, Any]:
    """Arguments that make another optimizer of this class: its defaults and attributes, of those that it takes.

    Defaults that it does not take are private, as ``decoupled_weight_decay`` of AdamW; the groups have all of them.
    """
    accepted: set[str] = set()
    for cls in type(optimizer).__mro__:
        if "__init__" not in vars(cls):
            continue
        parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
        accepted |= {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            break
    known = {**vars(optimizer), **optimizer.defaults}
    return {name: value for name, value in known.items() if name in accepted - {"self", "params", *_OF_EVERY_OPTIMIZER}}


def check_same_optimizer(optimizer: Optimizer, group: dist.ProcessGroup) -> None:
    """Compare hyperparameters and state, of tensors their shapes and dtypes, with those of the other ranks.

    Communication: one gather of a few bytes per value.

    Raises:
        ConfigurationError: they differ; raised on every rank.
    """
    everyone: list[Mapping[str, str]] = of_all_ranks(_described(optimizer), group)
    for rank, theirs in enumerate(everyone):
        for key in everyone[0].keys() | theirs.keys():
            first, other = everyone[0].get(key, "missing"), theirs.get(key, "missing")
            if first != other:
                raise ConfigurationError(
                    f"ranks convert different optimizers: {key} is {other} on rank {rank}, {first} on rank 0: build "
                    "the optimizer, and load its state, on every rank alike"
                )


def _described(optimizer: Optimizer) -> dict[str, str]:
    found: dict[str, str] = {}
    for place, group in enumerate(optimizer.param_groups):
        found.update((f"{key} of group {place}", fingerprint(value)) for key, value in options_of(group).items())
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name, parameter in zip(names_of(optimizer.param_groups), parameters, strict=True):
        for key, value in optimizer.state.get(parameter, {}).items():
            is_large = isinstance(value, Tensor) and value.dim()
            found[f"state {key!r} of {name}"] = (
                f"{tuple(value.shape)} {value.dtype}" if is_large else fingerprint(value)
            )
    return found


def copy_attributes(source: Optimizer, target: Optimizer) -> None:
    """Set the attributes of ``target`` that its constructor could not know, such as counters, to those of ``source``.

    Raises:
        UnsupportedError: one is not a plain value, and another one in ``target``.
    """
    for name, value in vars(source).items():
        if name in _OF_EVERY_OPTIMIZER:
            continue
        if type(value) in _PLAIN:
            setattr(target, name, value)
        elif not is_same_state(value, vars(target).get(name)):
            raise UnsupportedError(
                f"{type(source).__name__}.{name} is {described(value)}, which a new {type(source).__name__} has "
                "otherwise, and which cannot be taken over: build ZeroRedundancyOptimizer(ddp.parameters(), "
                f"{type(source).__name__}, ...) with the arguments of the old one, and load_state_dict() its state"
            )
