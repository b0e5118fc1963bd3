"""The random numbers of stochastic rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap.hooks.wires.wire import Wire

__all__ = ["RoundingGenerator"]


class RoundingGenerator:
    """What a user of ``wire`` gives to :meth:`Codec.encode`: ``None`` where the wire rounds to nearest.

    Each rank has random numbers of its own, and not the global ones, which the model's dropout uses.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._generator: torch.Generator | None = None
        self._state: Tensor | None = None

    def of(self, rank: int, device: torch.device) -> torch.Generator | None:
        """The same at every call; at first it is seeded with ``rank``, or goes on where the loaded one was."""
        if self._wire.is_stochastic and self._generator is None:
            self._generator = torch.Generator(device).manual_seed(rank)
            if self._state is not None:
                self._generator.set_state(self._state)
        return self._generator

    def state(self) -> Tensor | None:
        """What :meth:`load` takes; ``None`` before the first use."""
        return self._state if self._generator is None else self._generator.get_state()

    def load(self, state: Tensor | None) -> None:
        """Go on where the generator was that gave ``state``; anew where it is ``None``."""
        # A checkpoint may have been loaded to an accelerator.
        self._state, self._generator = None if state is None else state.cpu(), None
