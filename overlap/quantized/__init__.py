"""Collectives of ``torch.distributed`` whose tensors travel in fewer bits."""

from overlap.quantized.auto import DQuantType, auto_quantize

__all__ = ["DQuantType", "auto_quantize"]
