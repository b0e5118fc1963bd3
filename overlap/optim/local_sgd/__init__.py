"""Local SGD: averaging parameters every few steps instead of gradients at every step."""

from overlap.optim.local_sgd.optimizer import LocalSGD
from overlap.optim.local_sgd.torch_names import (
    ModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    average_parameters,
)

__all__ = [
    "LocalSGD",
    "ModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "average_parameters",
]
