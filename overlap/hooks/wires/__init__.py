"""What turns a tensor into fewer bytes and back: one codec for each format."""

from overlap.hooks.wires.exchange import QuantizedSum
from overlap.hooks.wires.feedback import ErrorFeedback
from overlap.hooks.wires.float8 import Float8
from overlap.hooks.wires.floats import BFloat16, Float16
from overlap.hooks.wires.integers import Int4, Int8
from overlap.hooks.wires.redistribution import redistribute
from overlap.hooks.wires.rounding import RoundingGenerator
from overlap.hooks.wires.sparse import TopK
from overlap.hooks.wires.wire import Codec, Wire

__all__ = [
    "BFloat16",
    "Codec",
    "ErrorFeedback",
    "Float16",
    "Float8",
    "Int4",
    "Int8",
    "QuantizedSum",
    "RoundingGenerator",
    "TopK",
    "Wire",
    "redistribute",
]
