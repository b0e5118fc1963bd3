"""Local SGD: averaging parameters now and then instead of gradients at every step."""

from overlap.optim.local_sgd.averagers import HierarchicalModelAverager, ModelAverager, PeriodicModelAverager
from overlap.optim.local_sgd.averaging import average_parameters
from overlap.optim.local_sgd.controller import LocalSGD
from overlap.optim.local_sgd.post_local import PostLocalSGDOptimizer
from overlap.optim.local_sgd.stage import Average

__all__ = [
    "Average",
    "HierarchicalModelAverager",
    "LocalSGD",
    "ModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "average_parameters",
]
