"""Gradients sent in fewer bytes."""

from overlap.hooks.quantize.gathered import GatherQuantized
from overlap.hooks.quantize.reducer import Quantize
from overlap.hooks.wires import QuantizedSum

__all__ = ["GatherQuantized", "Quantize", "QuantizedSum"]
