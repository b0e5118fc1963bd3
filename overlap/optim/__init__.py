"""How parameters change: the update stage, the optimizer of the training loop, functional optimizers."""

from overlap.optim.functional import (
    FunctionalAdadelta,
    FunctionalAdagrad,
    FunctionalAdam,
    FunctionalAdamax,
    FunctionalAdamW,
    FunctionalOptimizer,
    FunctionalRMSprop,
    FunctionalRprop,
    FunctionalSGD,
)
from overlap.optim.overlapped import OverlappedOptimizer
from overlap.optim.step import Step
from overlap.optim.zero import (
    ZeroRedundancyOptimizer,
    ZeroStep,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)

__all__ = [
    "FunctionalAdadelta",
    "FunctionalAdagrad",
    "FunctionalAdam",
    "FunctionalAdamW",
    "FunctionalAdamax",
    "FunctionalOptimizer",
    "FunctionalRMSprop",
    "FunctionalRprop",
    "FunctionalSGD",
    "OverlappedOptimizer",
    "Step",
    "ZeroRedundancyOptimizer",
    "ZeroStep",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
]
