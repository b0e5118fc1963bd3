"""Wires: formats that send tensors in fewer bytes."""

from overlap.hooks.wires.codec import Codec, Wire
from overlap.hooks.wires.exchange import QuantizedSum
from overlap.hooks.wires.feedback import RoundingGenerator, StageMemory, StageWithMemory, redistribute
from overlap.hooks.wires.formats import BFloat16, Float8, Float16, Int4, Int8, TopK

__all__ = [
    "BFloat16",
    "Codec",
    "Float16",
    "Float8",
    "Int4",
    "Int8",
    "QuantizedSum",
    "RoundingGenerator",
    "StageMemory",
    "StageWithMemory",
    "TopK",
    "Wire",
    "redistribute",
]
