"""Local SGD: averaging parameters every few steps instead of gradients at every step."""

from overlap.optim.local_sgd.model_averaging import average_parameters
from overlap.optim.local_sgd.optimizer import LocalSGD
from overlap.optim.local_sgd.stages import Average
from overlap.optim.local_sgd.torch_names import (
    HierarchicalModelAverager,
    ModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
)

__all__ = [
    "Average",
    "HierarchicalModelAverager",
    "LocalSGD",
    "ModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "average_parameters",
]
