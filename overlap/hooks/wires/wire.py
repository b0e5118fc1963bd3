"""What turns a tensor into fewer bytes and back."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from overlap.errors import ConfigurationError

__all__ = ["Codec", "Combine", "RoundingWire", "Wire", "aligned", "at_a_time"]

Combine = Callable[[Tensor, Tensor], Tensor]
"""Applies the second tensor to the first in place, as ``Tensor.add_`` does."""

# Of messages, in bytes: those that follow each other begin where any dtype can, and where NCCL copies fastest.
_ALIGNMENT = 16
# Values at a time on a CPU, so that they stay in the cache between two passes over them.
_BLOCK_NUMEL = 256 * 1024


class Wire(ABC):
    """How values travel; the same object serves gradients, parameters and averages.

    It holds options only. They are all in its ``repr``, which is what one would type, and which ranks compare at
    registration; a wire of your own is a frozen dataclass with ``repr=False``. What rounding leaves out is for those
    who use it to keep: see :class:`overlap.hooks.wires.ErrorFeedback`.
    """

    @property
    def is_stochastic(self) -> bool:
        """Whether :meth:`Codec.encode` needs a generator."""
        return False

    @property
    def largest(self) -> float:
        """The largest magnitude that it holds; values that are larger become infinite."""
        return torch.finfo(torch.float32).max

    @abstractmethod
    def codec(self, numel: int) -> Codec:
        """What encodes at least ``numel`` values as one message."""

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
    """A wire that rounds, to nearest or, with an error that is zero on average, up or down at random."""

    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        if self.rounding not in ("nearest", "stochastic"):
            raise ConfigurationError(f"rounding is {self.rounding!r}: give 'nearest' or 'stochastic'")

    @property
    def is_stochastic(self) -> bool:
        return self.rounding == "stochastic"


class Codec(ABC):
    """Encodes ``numel`` values as one message of ``message_bytes`` bytes, and decodes it.

    If some of the values are not finite, neither are some of the decoded ones.
    """

    @property
    @abstractmethod
    def numel(self) -> int:
        """How many values a message holds, padding included."""

    @property
    @abstractmethod
    def message_bytes(self) -> int:
        """The length of a message; a multiple of 16, so that messages can follow each other. 0 for no values."""

    @abstractmethod
    def encode(self, values: Tensor, message: Tensor, generator: torch.Generator | None = None) -> None:
        """Write ``values``, fp32 of shape ``(numel,)``, into ``message``, uint8 of shape ``(message_bytes,)``.

        ``generator``, on the device of ``values``, rounds stochastically; without one rounding is to nearest.
        """

    @abstractmethod
    def decode(self, message: Tensor, out: Tensor, combine: Combine | None = None) -> None:
        """Write what ``message`` holds to ``out``, fp32 of shape ``(numel,)``, or combine it with ``out`` in place."""


def aligned(message_bytes: int) -> int:
    """The length of a message that has room for so many bytes."""
    return math.ceil(message_bytes / _ALIGNMENT) * _ALIGNMENT


def at_a_time(rows: int, row_numel: int, device: torch.device) -> int:
    """How many of ``rows`` to encode or decode at once."""
    return max(1, _BLOCK_NUMEL // row_numel) if device.type == "cpu" else max(1, rows)
