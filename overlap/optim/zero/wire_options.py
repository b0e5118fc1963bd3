"""Which wires a sharded update takes, and for which parameters."""

from __future__ import annotations

from collections.abc import Iterable

from overlap._checks import check_flag, described
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.hooks.wires import Wire
from overlap.optim.zero.shards import Shard

__all__ = ["check_real", "check_wires"]


def check_wires(reduce_wire: Wire | None, gather_wire: Wire | None, *, error_feedback: bool) -> None:
    """Raises: ConfigurationError: one of these is not what it should be."""
    for name, wire in (("reduce_wire", reduce_wire), ("gather_wire", gather_wire)):
        if isinstance(wire, type) and issubclass(wire, Wire):
            raise ConfigurationError(f"{name} is the class {wire.__name__}: give one of its objects, {wire.__name__}()")
        if wire is not None and not isinstance(wire, Wire):
            raise ConfigurationError(f"{name} is a Wire such as Int8(), or None, got {described(wire)}")
    check_flag("error_feedback", error_feedback)
    if error_feedback and reduce_wire is None:
        raise ConfigurationError(
            "error_feedback=True keeps what reduce_wire leaves out of gradients, and reduce_wire is None: give one, as "
            "reduce_wire=Int4(), or leave error_feedback out; gather_wire needs none, since each difference holds what "
            "the one before left out"
        )


def check_real(shards: Iterable[Shard]) -> None:
    """Raises: UnsupportedError: a parameter is complex."""
    for shard in shards:
        if shard.parameter.is_complex():
            raise UnsupportedError(
                f"{shard.name} is {shard.parameter.dtype}, and wires take real numbers: leave reduce_wire and "
                "gather_wire out, or give complex parameters to an optimizer of their own"
            )
