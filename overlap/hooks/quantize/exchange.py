"""Where the sum over ranks was before."""

from overlap.hooks.wires.exchange import QuantizedSum

__all__ = ["QuantizedSum"]
