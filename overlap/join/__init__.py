"""Who still takes part in a step."""

from overlap.join.divisor import gradient_divisor

__all__ = ["gradient_divisor"]
