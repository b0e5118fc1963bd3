"""What all ranks had in common when a round began."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlap._torch.foreach import copy_all
from overlap.errors import ConfigurationError
from overlap.join.group_collectives import all_reduce
from overlap.optim.local_sgd.average import wider

__all__ = ["Anchors"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Phase(Enum):
    UNSET = auto()
    """The next step sets the anchors."""
    SET = auto()
    """They were set or loaded, and ranks have not compared theirs yet."""
    COMMON = auto()
    """All ranks are known to have the same."""


class Anchors:
    """Keeps a copy of what all ranks had when the round began, and moves it to the mean of what they have at its end.

    Args:
        parameters: the model's, by name.
        dtype: keep them in this dtype where it is wider.
    """

    def __init__(self, parameters: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
        self._parameters = dict(parameters)
        self.values = {name: p.detach().to(wider(p.dtype, dtype), copy=True) for name, p in parameters.items()}
        """The parameters at the beginning of the round, by name."""
        self._phase = _Phase.UNSET

    @property
    def is_set(self) -> bool:
        """Whether a round has begun."""
        return self._phase is not _Phase.UNSET

    def set_anchors(self) -> None:
        """Begin a round at the parameters as they are now."""
        copy_all(list(self.values.values()), [parameter.detach() for parameter in self._parameters.values()])
        self._phase = _Phase.SET

    def restart(self) -> None:
        """The next step begins a round at the parameters as they are then."""
        self._phase = _Phase.UNSET

    def check_common(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """In the first average since the anchors were set or loaded, check that all ranks have the same.

        Issues, then: one all-reduce of two numbers per parameter on ``group``.

        Raises:
            ConfigurationError: on every rank, where they differ.
        """
        assert self.is_set, "an average moves the anchors of the round that it ends"
        if self._phase is _Phase.COMMON:
            return
        sums = torch.stack(
            [
                value.view(_BITS[value.dtype.itemsize]).sum(dtype=torch.int64).to(device)
                for value in self.values.values()
            ]
        )
        extremes = torch.cat([sums, -sums])
        all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        largest, smallest = extremes[: len(sums)], -extremes[len(sums) :]
        if differing := [name for name, size in zip(self.values, (largest - smallest).tolist(), strict=True) if size]:
            raise ConfigurationError(
                f"ranks began the round with different parameters ({', '.join(differing[:3])}"
                f"{', ...' if len(differing) > 3 else ''}); with a wire or an "
                "outer optimizer all ranks must begin with the same: load the same model on every rank, or, in the "
                "middle of a round, each rank's own state"
            )
        self._phase = _Phase.COMMON

    def to_average(self, names: Sequence[str]) -> list[Tensor]:
        """The parameters, to be averaged in place and given to :meth:`step`; copies only where the dtype differs."""
        return [self._parameters[name].detach().to(self.values[name].dtype) for name in names]

    @torch.no_grad()
    def step(self, names: Sequence[str], means: Sequence[Tensor]) -> list[Tensor]:
        """Move the anchors of some parameters to their means over ranks; returns the new values."""
        anchors = [self.values[name] for name in names]
        copy_all(anchors, means)
        return anchors

    def write(self, names: Sequence[str]) -> None:
        """Copy the new values into the parameters."""
        copy_all([self._parameters[name].detach() for name in names], [self.values[name] for name in names])

    def state_dict(self) -> dict[str, Any]:
        """The parameters at the beginning of the round."""
        return {"anchors": dict(self.values) if self.is_set else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave; without anchors the next step begins a round."""
        anchors = state.get("anchors", {})
        if anchors and anchors.keys() != self.values.keys():
            raise ConfigurationError("the state of local SGD is of a model with other parameters")
        with torch.no_grad():
            copy_all([self.values[name] for name in anchors], list(anchors.values()))
        self._phase = _Phase.SET if anchors else _Phase.UNSET
