"""How far two runs differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp, all_reduce

from overlap.demo.train import Run
from overlap.optim import ZeroRedundancyOptimizer

__all__ = ["Parity", "compare", "largest_difference"]


@dataclass(frozen=True)
class Parity:
    """Largest absolute differences, over all ranks; infinite where one side is missing or not finite."""

    parameters: float
    optimizer_state: float
    buffers: float

    @property
    def largest(self) -> float:
        """Of all that was compared."""
        return max(self.parameters, self.optimizer_state, self.buffers)


def compare(first: Run, second: Run) -> Parity:
    """Compares models and optimizers. Issues collectives, so every rank has to call it."""
    differences = torch.tensor(
        [
            largest_difference(dict(first.ddp.named_parameters()), dict(second.ddp.named_parameters())),
            largest_difference(_optimizer_state(first), _optimizer_state(second)),
            largest_difference(dict(first.ddp.named_buffers()), dict(second.ddp.named_buffers())),
        ],
        dtype=torch.float64,
    ).to(next(first.ddp.parameters()).device)
    all_reduce(differences, ReduceOp.MAX)
    return Parity(*differences.tolist())


def _optimizer_state(run: Run) -> dict[str, Any]:
    optimizer = run.recipe.optimizer
    state = (
        _whole_state(optimizer) if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer.state_dict()["state"]
    )
    return {f"{index}.{name}": value for index, values in state.items() for name, value in values.items()}


def _whole_state(zero: ZeroRedundancyOptimizer) -> dict[int, Any]:
    """What the plain optimizer has, on every rank in turn."""
    whole: dict[int, Any] = {}
    for rank in range(zero.world_size):
        zero.consolidate_state_dict(to=rank)
        if rank == zero.rank:
            whole = zero.state_dict()["state"]
    return whole


def largest_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    if first.keys() != second.keys():
        return math.inf
    return _max(_difference(first[name], second[name]) for name in first)


def _difference(first: Any, second: Any) -> float:
    if first is None or second is None:  # SGD without momentum keeps an empty buffer.
        return 0.0 if first is second else math.inf
    one, other = (torch.as_tensor(value).detach().to(torch.float64) for value in (first, second))
    if one.shape != other.shape:
        return math.inf
    return _finite_max((one - other).abs())


def _finite_max(values: Tensor) -> float:
    if values.numel() == 0:
        return 0.0
    largest = float(values.max())  # NaN if there is one.
    return largest if math.isfinite(largest) else math.inf


def _max(values: Iterable[float]) -> float:
    return max(values, default=0.0)
