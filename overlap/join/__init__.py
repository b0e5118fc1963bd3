"""Ranks with different numbers of batches: which of them take part in a step, and how the others follow."""

from overlap._lazy import check_imported_as
from overlap.join.context import Join, gradient_divisor

check_imported_as(__name__, "overlap.join")

__all__ = ["Join", "gradient_divisor"]
