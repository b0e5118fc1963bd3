"""What a value of an optimizer's state belongs to.

[Note: kinds of state]

An optimizer says nothing of its state but keys and values. A value is *by element* if it has the shape of what it
belongs to: the whole parameter, or the chunk that this rank owns. It is *by parameter* if it is one number, one tensor
of one element, or a table that has the same shape for parameters of several sizes. For a parameter of one element
shapes do not tell these apart; then the same key of other parameters does. State under keys that are not parameters is
*global*, and never comes here.

Anything else depends on the size of a chunk in another way, as the scales of blocks do. Put together from the chunks of
several ranks it would not be what the plain optimizer has, so it is refused. If parameters are not cut there is nothing
to put together, and any value may belong to one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from overlap.errors import UnsupportedError

__all__ = ["Kind", "Kinds", "StateValue", "tensors_in"]

# Numbers per parameter in optimizers of PyTorch, for models in which every parameter has one element.
_KNOWN_BY_PARAMETER = ("step", "mu_product", "eta", "mu")

_LIKELY_BLOCKS = tuple(2**power for power in range(3, 17))


class Kind(Enum):
    """See [Note: kinds of state]."""

    BY_ELEMENT = "by element"
    BY_PARAMETER = "by parameter"


@dataclass(frozen=True)
class StateValue:
    """One value of the state of a parameter, or of the chunk of a parameter that a rank owns."""

    name: str
    """The parameter, in messages."""
    shape: tuple[int, ...]
    """The shape of the parameter or chunk."""
    key: str
    value: Any

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def fits_element(self) -> bool:
        return isinstance(self.value, Tensor) and tuple(self.value.shape) == self.shape

    @property
    def fits_parameter(self) -> bool:
        if isinstance(self.value, Tensor):
            return self.value.numel() == 1
        return not any(tensor.numel() > 1 for tensor in tensors_in(self.value))


@dataclass
class _Seen:
    """What all values of one key have shown."""

    is_by_element: bool = False
    is_by_parameter: bool = False
    table_shapes: set[tuple[int, ...]] = field(default_factory=set)
    numels: set[int] = field(default_factory=set)
    """The sizes of what has a table: a tensor of several elements in another shape than its own."""

    def note(self, value: StateValue) -> None:
        fits_element, fits_parameter = value.fits_element, value.fits_parameter
        self.is_by_element |= fits_element and not fits_parameter
        self.is_by_parameter |= fits_parameter and not fits_element
        if isinstance(value.value, Tensor) and not fits_element and not fits_parameter:
            self.table_shapes.add(tuple(value.value.shape))
            self.numels.add(value.numel)

    @property
    def is_table(self) -> bool:
        """Whether the shape does not depend on the size of what the value belongs to."""
        if len(self.table_shapes) != 1:
            return False
        (shape,), (numel, *others) = self.table_shapes, sorted(self.numels)
        return bool(others) or not any(-(-numel // block) == torch.Size(shape).numel() for block in _LIKELY_BLOCKS)


class Kinds:
    """Tells the kinds of the values of one state. See [Note: kinds of state].

    Args:
        optimizer: the optimizer's name in messages.
        values: all that there is, since one value alone may be of either kind.
        are_cut: whether parameters are divided among ranks by element.
    """

    def __init__(self, optimizer: str, values: Iterable[StateValue], *, are_cut: bool) -> None:
        self._optimizer = optimizer
        self._are_cut = are_cut
        self._seen: dict[str, _Seen] = {}
        for value in values:
            self._seen.setdefault(value.key, _Seen()).note(value)

    def of(self, value: StateValue) -> Kind:
        """The kind of one of the values.

        Raises:
            UnsupportedError: it is of no kind that can be divided.
        """
        seen = self._seen[value.key]
        if value.fits_element and value.fits_parameter:
            is_by_parameter = seen.is_by_parameter or value.key in _KNOWN_BY_PARAMETER
            return Kind.BY_PARAMETER if is_by_parameter and not seen.is_by_element else Kind.BY_ELEMENT
        if value.fits_element and type(value.value) in (Tensor, torch.nn.Parameter):
            return Kind.BY_ELEMENT
        if value.fits_parameter or not self._are_cut or (isinstance(value.value, Tensor) and seen.is_table):
            return Kind.BY_PARAMETER
        raise UnsupportedError(
            f"{self._optimizer}: state {value.key!r} of {value.name} is {_told(value.value)} for {value.numel} "
            f"elements: neither one value per element nor one per parameter{self._hint(value)}, so it cannot be "
            "divided by element; use ZeroRedundancyOptimizer(..., partition='parameter')"
        )

    def _hint(self, value: StateValue) -> str:
        is_blocks = isinstance(value.value, Tensor) and 1 < value.value.numel() < value.numel
        return " (perhaps one per block of elements)" if is_blocks else ""


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} {value.dtype}"
    return f"a {type(value).__name__}"
