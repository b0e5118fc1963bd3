"""ZeRO: each rank keeps a part of the optimizer's state and updates a part of every parameter."""

from overlap.optim.zero.optimizer import ZeroRedundancyOptimizer
from overlap.optim.zero.step import (
    ReduceScatter,
    ZeroStep,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)

__all__ = [
    "ReduceScatter",
    "ZeroRedundancyOptimizer",
    "ZeroStep",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
]
