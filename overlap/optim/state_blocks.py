"""Optimizers whose state has a number for each block of elements.

[Note: state in blocks]

Moments in 8 bits have one scale for each block of consecutive elements, in the order of ``parameter.flatten()``. How
many elements a block has cannot be read off the shapes for certain, and a parameter may be divided among ranks between
blocks alone. So such an optimizer declares it: its class has ``state_by_block``, the keys of its state that have one
number for each block, as 1-D tensors, and each of its groups has two options, ``block_numel``, the elements of a block,
and ``min_numel``: parameters of fewer elements have no such state. :class:`AdamW8bit` does, and another optimizer may.

The declaration is trusted for the state, and tested as for any optimizer (see [Note: what an optimizer couples])
with cuts between blocks. A part must be treated as the whole is, so no part is smaller than ``min_numel`` where the
whole is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from overlap.hooks.segments import round_up

__all__ = ["StateBlocks", "keys_by_block"]


def keys_by_block(optimizer: Optimizer) -> tuple[str, ...]:
    """The keys of its state that ``optimizer`` declares to have one number for each block."""
    return tuple(getattr(type(optimizer), "state_by_block", ()))


@dataclass(frozen=True)
class StateBlocks:
    """What the optimizer of one group declares. See [Note: state in blocks]."""

    keys: tuple[str, ...]
    """Those of the state that have a number for each block."""
    numel: int
    """The elements of a block; the last of a parameter may have fewer."""
    min_numel: int
    """Parameters of fewer elements have no such state."""

    @classmethod
    def of(cls, optimizer: Optimizer, group: Mapping[str, Any]) -> StateBlocks | None:
        """What ``optimizer`` declares of a group with these options; ``None`` for all that declare nothing."""
        keys, numel = keys_by_block(optimizer), group.get("block_numel")
        return cls(keys, numel, group.get("min_numel", 0)) if keys and numel is not None else None

    @property
    def told(self) -> str:
        """The options, in messages."""
        return f"block_numel={self.numel} and min_numel={self.min_numel}"

    def count(self, numel: int) -> int:
        """How many blocks ``numel`` elements have.

        >>> StateBlocks(("scale",), 256, 4096).count(5000)
        20
        """
        return -(-numel // self.numel)

    def span(self, start: int, end: int) -> slice:
        """Which of the blocks these elements are in; both are between blocks, or ``end`` is the parameter's.

        >>> StateBlocks(("scale",), 256, 4096).span(4096, 8200)
        slice(16, 33, None)
        """
        return slice(self.count(start), self.count(end))

    def cut_multiple(self, numel: int) -> int:
        """At multiples of how many elements a parameter of ``numel`` may be cut, into parts no smaller than that.

        >>> blocks = StateBlocks(("scale",), 256, 4096)
        >>> blocks.cut_multiple(100), blocks.cut_multiple(10_000)
        (1, 4096)
        """
        return 1 if numel < self.min_numel else round_up(max(self.min_numel, self.numel), self.numel)
