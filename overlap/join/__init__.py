"""Who still takes part in a step."""

from overlap.join.context import Join
from overlap.join.divisor import gradient_divisor
from overlap.join.joinable import Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable", "gradient_divisor"]
