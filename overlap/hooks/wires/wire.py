"""What turns a tensor into fewer bytes and back."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from overlap._checks import is_one_of, told
from overlap.errors import ConfigurationError

__all__ = ["Codec", "Combine", "RoundingWire", "Wire", "filled_up"]

Combine = Callable[[Tensor, Tensor], Tensor]
"""Applies the second tensor to the first in place, as ``Tensor.add_`` does."""


class Wire(ABC):
    """How values travel; the same object serves gradients, parameters and averages.

    It holds options only. They are all in its ``repr``, which is what one would type, and which ranks compare at
    registration; a wire of your own is a frozen dataclass with ``repr=False``. What rounding leaves out is for those
    who use it to keep: see :class:`overlap.hooks.wires.ErrorFeedback`.

    >>> wire = Int8(chunk=256)
    >>> isinstance(wire, Wire), wire
    (True, Int8(chunk=256))
    >>> registration = chain(Quantize(wire)).register(ddp)
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
        if not is_one_of(self.rounding, "nearest", "stochastic"):
            raise ConfigurationError(f"rounding is {told(self.rounding)}: give 'nearest' or 'stochastic'")

    @property
    def is_stochastic(self) -> bool:
        return self.rounding == "stochastic"


class Codec(ABC):
    """Encodes ``numel`` values as one message of ``message_bytes`` bytes, and decodes it.

    If some of the values are not finite, neither are some of the decoded ones. Where rows are encoded or decoded, they
    may all be shorter than ``numel``, by as much as each other: zeros follow, which are sent, but nowhere kept.
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

    def encode_rows(self, values: Tensor, messages: Tensor, generator: torch.Generator | None = None) -> None:
        """Write each row of ``values``, shape ``(n, numel)``, into one of ``messages``, ``(n, message_bytes)``.

        The messages are those of :meth:`encode`, called row by row.
        """
        with filled_up(values, self.numel) as rows:
            for row, message in zip(rows, messages, strict=True):
                self.encode(row, message, generator)

    def subtract_rows(self, values: Tensor, messages: Tensor, generator: torch.Generator | None = None) -> None:
        """As :meth:`encode_rows`, and leave in ``values`` what the messages do not hold of them."""
        self.encode_rows(values, messages, generator)
        self.decode_rows(messages, values, Tensor.sub_)

    def decode_rows(self, messages: Tensor, out: Tensor, combine: Combine | None = None) -> None:
        """Write what each of ``messages``, ``(n, message_bytes)``, holds to a row of ``out``, ``(n, numel)``, or
        combine it with that row."""
        with filled_up(out, self.numel, changes=True) as rows:
            for message, row in zip(messages, rows, strict=True):
                self.decode(message, row, combine)

    def add_rows(self, messages: Tensor, total: Tensor, *, alpha: float = 1.0) -> None:
        """Add ``alpha`` times what each of ``messages``, ``(n, message_bytes)``, holds to ``total``, ``(numel,)``.

        On a CPU in their order; where there are streams, they may be added up first.
        """
        with filled_up(total, self.numel, changes=True) as whole:
            for message in messages:
                self.decode(message, whole, lambda summed, summand: summed.add_(summand, alpha=alpha))


@contextmanager
def filled_up(values: Tensor, numel: int, *, changes: bool = False) -> Iterator[Tensor]:
    """``values`` with zeros behind the last dimension, up to ``numel``; a copy where there are any.

    ``changes``: what becomes of the values within is copied back.
    """
    given = values.size(-1)
    if given == numel:
        yield values
        return
    whole = pad(values, (0, numel - given))
    yield whole
    if changes:
        values.copy_(whole[..., :given])
