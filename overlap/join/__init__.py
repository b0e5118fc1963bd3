"""Ranks with different numbers of batches: which of them take part in a step, and how the others follow."""

from overlap.join.context import Join
from overlap.join.divisor import gradient_divisor
from overlap.join.joinable import Joinable, JoinHook

__all__ = ["Join", "JoinHook", "Joinable", "gradient_divisor"]
