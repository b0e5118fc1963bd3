"""How parameters change: the update stage, the optimizer of the training loop, functional optimizers."""

from typing import TYPE_CHECKING

from overlap._lazy import check_imported_as, lazy_names

check_imported_as(__name__, "overlap.optim")

if TYPE_CHECKING:
    from overlap.optim.declared import declare
    from overlap.optim.local_sgd import (
        HierarchicalModelAverager,
        LocalSGD,
        ModelAverager,
        PeriodicModelAverager,
        PostLocalSGDOptimizer,
        average_parameters,
    )
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
    from overlap.optim.zero import (
        ReduceScatter,
        ZeroRedundancyOptimizer,
        ZeroStep,
        hook_with_zero_step,
        hook_with_zero_step_interleaved,
    )
else:
    # Where each name is from; see overlap._lazy.
    _PARTS = {
        "declared": ("declare",),
        "local_sgd": (
            "HierarchicalModelAverager",
            "LocalSGD",
            "ModelAverager",
            "PeriodicModelAverager",
            "PostLocalSGDOptimizer",
            "average_parameters",
        ),
        "optimizer": ("OverlappedOptimizer",),
        "step": ("Step",),
        "torch_names": (
            "FunctionalAdadelta",
            "FunctionalAdagrad",
            "FunctionalAdam",
            "FunctionalAdamax",
            "FunctionalAdamW",
            "FunctionalOptimizer",
            "FunctionalRMSprop",
            "FunctionalRprop",
            "FunctionalSGD",
        ),
        "zero": (
            "ReduceScatter",
            "ZeroRedundancyOptimizer",
            "ZeroStep",
            "hook_with_zero_step",
            "hook_with_zero_step_interleaved",
        ),
    }
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
    "declare",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
]
