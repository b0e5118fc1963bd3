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
from overlap.optim.local_sgd import (
    Average,
    HierarchicalModelAverager,
    LocalSGD,
    ModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    average_parameters,
)
from overlap.optim.overlapped import OverlappedOptimizer
from overlap.optim.step import Step
from overlap.optim.zero import (
    ReduceScatter,
    ZeroRedundancyOptimizer,
    ZeroStep,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)

__all__ = [
    "Average",
    "FunctionalAdadelta",
    "FunctionalAdagrad",
    "FunctionalAdam",
    "FunctionalAdamW",
    "FunctionalAdamax",
    "FunctionalOptimizer",
    "FunctionalRMSprop",
    "FunctionalRprop",
    "FunctionalSGD",
    "HierarchicalModelAverager",
    "LocalSGD",
    "ModelAverager",
    "OverlappedOptimizer",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "ReduceScatter",
    "Step",
    "ZeroRedundancyOptimizer",
    "ZeroStep",
    "average_parameters",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
]
