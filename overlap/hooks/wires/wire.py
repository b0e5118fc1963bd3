"""The base of all wires: options, and a codec for a number of values."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import torch

from overlap._checks import is_one_of, told
from overlap.errors import ConfigurationError
from overlap.hooks.wires.blocks import Codec

__all__ = ["RoundingWire", "Wire"]


class Wire(ABC):
    """How values are sent in fewer bytes; the same object serves gradients, parameters and averages.

    It holds options only. They are all in its ``repr``, which is valid code, and which ranks compare at registration; a
    wire of your own is a frozen dataclass with ``repr=False``. Rounding errors are kept by the user of a wire: see
    :class:`overlap.hooks.wires.ErrorFeedback`.

    >>> wire = Int8(chunk=256)
    >>> isinstance(wire, Wire), wire
    (True, Int8(chunk=256))
    >>> registration = chain(Quantize(wire)).register(ddp)
    """

    @property
    def is_stochastic(self) -> bool:
        """Whether encoding needs a generator."""
        return False

    @property
    def largest(self) -> float:
        """The largest finite magnitude; larger values become infinite."""
        return torch.finfo(torch.float32).max

    @abstractmethod
    def codec(self, numel: int) -> Codec:
        """The codec of messages of at least ``numel`` values."""

    def __repr__(self) -> str:
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        values = {field: getattr(self, field.name) for field in fields}
        options = [repr(value) for field, value in values.items() if not field.kw_only]
        for field, value in values.items():
            if field.kw_only and value != field.default:
                options.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(options)})"


@dataclass(frozen=True, kw_only=True, repr=False)
class RoundingWire(Wire):
    """A wire that rounds: to nearest or, stochastically, up or down with an error that is zero on average."""

    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        if not is_one_of(self.rounding, "nearest", "stochastic"):
            raise ConfigurationError(f"rounding is {told(self.rounding)}: give 'nearest' or 'stochastic'")

    @property
    def is_stochastic(self) -> bool:
        return self.rounding == "stochastic"
