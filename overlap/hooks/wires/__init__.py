"""What turns a tensor into fewer bytes and back: one codec for each format."""

from overlap.hooks.wires.feedback import ErrorFeedback
from overlap.hooks.wires.integers import Int4, Int8
from overlap.hooks.wires.wire import Codec, Wire

__all__ = ["Codec", "ErrorFeedback", "Int4", "Int8", "Wire"]
