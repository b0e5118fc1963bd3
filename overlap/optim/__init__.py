"""How parameters change: the update stage, the optimizer of the training loop, functional optimizers."""

from typing import TYPE_CHECKING

from overlap._lazy import check_imported_as, lazy_names
from overlap.optim.declared import declare
from overlap.optim.optimizer import OverlappedOptimizer
from overlap.optim.step import Step
from overlap.optim.torch_names import (
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

check_imported_as(__name__, "overlap.optim")

if TYPE_CHECKING:
    from overlap.optim.local_sgd import *
    from overlap.optim.zero import *
else:
    # They import PyTorch's classes of these names, which takes a second.
    _PARTS = ("zero", "local_sgd")
    __getattr__, __dir__ = lazy_names(__name__, _PARTS)

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
    "declare",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
]
