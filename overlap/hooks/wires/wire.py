"""What turns a tensor into fewer bytes and back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Codec", "Wire"]

Combine = Callable[[Tensor, Tensor], Tensor]
"""Applies the second tensor to the first in place, as ``Tensor.add_`` does."""


class Wire(ABC):
    """How values travel; the same object serves gradients, parameters and averages.

    It holds options only. What rounding leaves out is for those who use it to keep: see
    :class:`overlap.hooks.wires.ErrorFeedback`.
    """

    @property
    def is_stochastic(self) -> bool:
        """Whether :meth:`Codec.encode` needs a generator."""
        return False

    @abstractmethod
    def codec(self, numel: int) -> Codec:
        """What encodes at least ``numel`` values as one message."""


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
        """The length of a message; a multiple of 4, so that messages can follow each other."""

    @abstractmethod
    def encode(self, values: Tensor, message: Tensor, generator: torch.Generator | None = None) -> None:
        """Write ``values``, fp32 of shape ``(numel,)``, into ``message``, uint8 of shape ``(message_bytes,)``.

        ``generator``, on the device of ``values``, rounds stochastically; without one rounding is to nearest.
        """

    @abstractmethod
    def decode(self, message: Tensor, out: Tensor, combine: Combine | None = None) -> None:
        """Write what ``message`` holds to ``out``, fp32 of shape ``(numel,)``, or combine it with ``out`` in place."""
