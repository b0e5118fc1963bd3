"""Collectives of ``torch.distributed`` whose tensors travel in fewer bits."""

from overlap.quantized.auto import auto_quantize
from overlap.quantized.formats import DQuantType

__all__ = ["DQuantType", "auto_quantize"]
