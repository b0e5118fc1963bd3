"""Copies of an optimizer that step a few small parameters in place of its own."""

from __future__ import annotations

import copy
import types
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._torch.optimizer import bare_copy
from overlap.optim.group_kinds import LARGE_FROM, one_of_each_kind
from overlap.optim.snapshot import Snapshot, is_own, snapshot
from overlap.optim.wrappers import held_by, reachable

__all__ = ["WHOLE", "CannotCopyError", "Miniature", "MiniatureMaker", "piece_of"]

WHOLE = slice(None)
_SMALL, _LARGE = 192, 8256
_SHAPES = {
    _SMALL: {1: (192,), 2: (12, 16), 3: (4, 6, 8), 4: (4, 4, 4, 3)},
    _LARGE: {1: (8256,), 2: (96, 86), 3: (8, 12, 86), 4: (8, 12, 2, 43)},
}
# Whole vectors of any dtype, but no multiple of the blocks of which blockwise state is made.
_CUTS = {1: 0, _SMALL: 96, _LARGE: 2784}
# Attributes with tensors larger than this belong to the real parameters, and not to the small ones.
_LARGEST_ATTRIBUTE = 65536


class CannotCopyError(Exception):
    """A copy would not behave as the optimizer does, or would share with it what changes; says why."""


@dataclass(frozen=True)
class Miniature:
    """A copy of an optimizer with small parameters, or with pieces of them, in the groups of their originals."""

    optimizer: Optimizer
    parameters: list[Tensor]

    def snapshot(self) -> Snapshot:
        """What it holds now."""
        return snapshot(self.optimizer, self.parameters)


class MiniatureMaker:
    """Makes copies of ``optimizer`` that all begin in the same way, with a few of its groups, one of each kind.

    Raises:
        CannotCopyError: it cannot be copied, or has no parameters.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._generator = torch.Generator().manual_seed(1)
        _check_attributes(optimizer)
        self._groups = one_of_each_kind(optimizer.param_groups)
        self._chosen = [parameter for group in self._groups for parameter in _representatives(group["params"])]
        if not self._chosen:
            raise CannotCopyError("it has no parameters yet")
        self.values = [self._random(_shape(parameter), parameter) * 0.5 for parameter in self._chosen]
        """What the parameters of every copy are at first."""

    @property
    def cuts(self) -> list[int]:
        """Where each parameter, flattened, is best cut in two; 0 if it cannot be."""
        return [_CUTS[value.numel()] for value in self.values]

    def make(self, pieces: Sequence[slice | None]) -> Miniature:
        """A copy whose parameters are these pieces of the chosen ones; where it is ``None`` there is no parameter."""
        stand_ins: dict[int, Tensor] = {}
        for parameter, value, piece in zip(self._chosen, self.values, pieces, strict=True):
            if piece is not None:
                stand_ins[id(parameter)] = _leaf(piece_of(value, piece).clone())
        copied = bare_copy(self._optimizer)
        memo: dict[int, Any] = {id(self._optimizer): copied}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                memo[id(parameter)] = stand_ins.get(id(parameter), _leaf(parameter.detach().new_zeros(0)))
        own = {key: value for key, value in vars(self._optimizer).items() if is_own(key)}
        copied.__dict__.update(copy.deepcopy(own, memo))
        copied.state = self._copied_state(memo)
        copied.param_groups = [
            {
                **copy.deepcopy({key: value for key, value in group.items() if key != "params"}, memo),
                "params": [stand_ins[id(p)] for p in group["params"] if id(p) in stand_ins],
            }
            for group in self._groups
        ]
        for group in copied.param_groups:
            _give_rate(group, self._optimizer.defaults)
        chosen = [stand_ins[id(p)] for p in self._chosen if id(p) in stand_ins]
        return Miniature(copied, chosen)

    def _copied_state(self, memo: dict[int, Any]) -> Any:
        """State of no parameter; what is kept under other keys is copied."""
        state = self._optimizer.state
        shared = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
        return defaultdict(dict, copy.deepcopy(shared, memo))

    def gradient(self, place: int, scale: float) -> Tensor:
        """One for the parameter at ``place``, away from zero, and from what has no square in half precision."""
        like = self.values[place]
        values = torch.randn(like.shape, generator=self._generator)
        values = (values + values.sign() * 0.5) * (max(scale, 0.05) if like.dtype == torch.float16 else scale)
        return values.to(device=like.device, dtype=like.dtype)

    def _random(self, shape: Sequence[int], like: Tensor) -> Tensor:
        values = torch.randn(tuple(shape), generator=self._generator)
        return values.to(device=like.device, dtype=like.dtype)


def _check_attributes(optimizer: Optimizer) -> None:
    """Raises: CannotCopyError: a copy would share what changes with the optimizer, or be large."""
    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for value in reachable(held_by(optimizer)):
        if isinstance(value, Tensor) and id(value) not in parameters and value.numel() > _LARGEST_ATTRIBUTE:
            raise CannotCopyError(f"an attribute holds a tensor of {value.numel()} elements")
        # A function is copied by reference, with all that it has closed over.
        if isinstance(value, types.FunctionType) and any(
            isinstance(inner, (Tensor, Optimizer)) for inner in reachable([value])
        ):
            raise CannotCopyError(f"the function {value.__qualname__} refers to tensors")


def _representatives(parameters: Sequence[Tensor]) -> list[Tensor]:
    """The largest and the smallest parameter of each number of dimensions."""
    by_dimensions: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.numel() and parameter.requires_grad:
            by_dimensions.setdefault(parameter.dim(), []).append(parameter)
    chosen = []
    for those in by_dimensions.values():
        largest, smallest = max(those, key=Tensor.numel), min(reversed(those), key=Tensor.numel)
        chosen += [largest] if largest is smallest else [largest, smallest]
    return chosen


def _shape(parameter: Tensor) -> tuple[int, ...]:
    if parameter.dim() == 0:
        return ()
    numel = _SMALL if parameter.numel() < LARGE_FROM else _LARGE
    missing = max(0, parameter.dim() - 4)
    return (1,) * missing + _SHAPES[numel][parameter.dim() - missing]


def piece_of(value: Tensor, piece: slice) -> Tensor:
    """The value itself for the whole of it, and flat otherwise, as elements are sharded."""
    return value if piece == slice(None) else value.reshape(-1)[piece]


def _leaf(value: Tensor) -> Tensor:
    return torch.nn.Parameter(value)


def _give_rate(group: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """A rate of zero, with which a warm-up begins, would hide everything."""
    rate = group.get("lr")
    if not isinstance(rate, (int, float, Tensor)) or bool(rate):
        return
    usable = [r for r in (group.get("initial_lr"), defaults.get("lr")) if isinstance(r, (int, float)) and r]
    given = float(usable[0]) if usable else 0.01
    if isinstance(rate, Tensor):
        rate.fill_(given)
    else:
        group["lr"] = given
