"""Optimizer state shared out among the ranks."""

from overlap.optim.zero.optimizer import ZeroRedundancyOptimizer
from overlap.optim.zero.stage import ZeroStep

__all__ = ["ZeroRedundancyOptimizer", "ZeroStep"]
