"""Copies of what is averaged, so that an average that fails has changed nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from overlap.optim.local_sgd.anchors import Anchors
from overlap.optim.local_sgd.average import Packed, Weight, pack_named
from overlap.optim.local_sgd.model_tensors import ModelTensors

__all__ = ["ModelCopies"]


class ModelCopies:
    """Copies of a model's parameters and buffers on the host, in packs of some megabytes.

    Args:
        tensors: of the model.
        dtype: of the copies, where it is wider than their own.
    """

    def __init__(self, tensors: ModelTensors, dtype: torch.dtype | None) -> None:
        self._parameters = _copied(tensors.parameters_of(0), dtype)
        self._others = _copied(tensors.others_of(0), dtype)

    @property
    def flat(self) -> list[Tensor]:
        """The copies, one tensor of shape ``(numel,)`` for each pack."""
        return [flat for _, _, flat in (*self._parameters, *self._others)]

    def scale_(self, weight: Weight) -> None:
        """Scale the copies, so that their sum over processes is the mean."""
        for flat in self.flat:
            weight.scale_(flat)

    def take(self, means: Sequence[Tensor]) -> None:
        """Take over the copies of another process."""
        for flat, mean in zip(self.flat, means, strict=True):
            flat.copy_(mean)

    @torch.no_grad()
    def store(self, anchors: Anchors | None) -> None:
        """Write the means into the model; where there are ``anchors``, what these make of parameters."""
        for _, part, flat in self._others if anchors is not None else (*self._parameters, *self._others):
            part.store(flat)
        if anchors is not None:
            mean_of = {
                name: mean for names, part, flat in self._parameters
                for name, mean in zip(names, part.views(flat), strict=True)
            }  # fmt: skip
            names = list(mean_of)
            anchors.step(names, [mean_of[name].to(anchors.values[name].device) for name in names])
            anchors.write(names)


def _copied(named: Mapping[str, Tensor], dtype: torch.dtype | None) -> list[tuple[list[str], Packed, Tensor]]:
    return [(names, part, part.load().cpu()) for names, part in pack_named(named, dtype=dtype)]
