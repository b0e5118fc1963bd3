"""Recognizing optimizers whose ``step`` reaches further than their own class and parameters.

An update in backward steps the parameters of one bucket by an object of the optimizer's class with groups of its own
(see [Note: stepping a subset]). Where ``step`` goes on to another optimizer, or is not the class's own, that object
would reach all parameters, or would not do what the optimizer does.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from overlap._torch.optimizer import own_step
from overlap.optim.snapshot import is_own

__all__ = ["held_by", "reachable", "why_not_in_parts"]

_MANY = 10_000


def why_not_in_parts(optimizer: Optimizer) -> str | None:
    """What ``optimizer`` has that an object of its class with other groups would not, in words, or ``None``."""
    for value in reachable(held_by(optimizer)):
        if isinstance(value, Optimizer) and value is not optimizer:
            return f"its step() goes on to another optimizer ({type(value).__name__})"
    if own_step(optimizer) is not None:
        return "its step() was replaced on the object"
    if "param_groups" not in vars(optimizer) or _overrides(type(optimizer), "param_groups"):
        return "its param_groups are not an attribute of its own"
    if not callable(type(optimizer).step):
        return "its step is not a method of its class"
    return None


def held_by(optimizer: Optimizer) -> list[Any]:
    """What the optimizer has beside parameters, state and hooks: attributes, and functions of its class."""
    attributes = [value for key, value in vars(optimizer).items() if is_own(key) and key != "defaults"]
    of_class = [
        value
        for cls in type(optimizer).__mro__
        if cls is not Optimizer and issubclass(cls, Optimizer)
        for value in vars(cls).values()
        if isinstance(value, (types.FunctionType, property))
    ]
    return attributes + of_class


def reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """Every object that ``roots`` lead to, by way of containers, attributes and the closures of functions."""
    waiting, seen = deque(roots), set[int]()
    while waiting and len(seen) < _MANY:
        value = waiting.popleft()
        if id(value) in seen or isinstance(value, (type, types.ModuleType, str, bytes, int, float)):
            continue
        seen.add(id(value))
        yield value
        if not isinstance(value, (torch.Tensor, Optimizer)):
            waiting.extend(_parts(value))


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from value
    elif isinstance(value, types.MethodType):
        yield value.__self__
        yield value.__func__
    elif isinstance(value, types.FunctionType):
        yield from _closure(value)
        yield from value.__defaults__ or ()
        yield from vars(value).values()
    elif isinstance(value, property):
        yield from (value.fget, value.fset)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    else:
        yield from getattr(value, "__dict__", {}).values()


def _closure(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # Not filled yet.
            continue


def _overrides(cls: type, name: str) -> bool:
    return any(name in vars(base) for base in cls.__mro__ if base is not Optimizer and issubclass(base, Optimizer))
