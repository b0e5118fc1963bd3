"""Gradients sent as integers of 8 or 4 bits."""

from overlap.hooks.quantize.exchange import QuantizedSum
from overlap.hooks.quantize.gathered import GatherQuantized
from overlap.hooks.quantize.reducer import Quantize

__all__ = ["GatherQuantized", "Quantize", "QuantizedSum"]
