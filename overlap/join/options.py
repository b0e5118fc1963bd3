"""What a Join was told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from overlap._checks import check_flag, is_one_of, told
from overlap.errors import ConfigurationError

__all__ = ["JoinOptions", "OnExhausted", "check_on_exhausted"]

OnExhausted = Literal["shadow", "stop", "raise"]


@dataclass(frozen=True)
class JoinOptions:
    """The same on every rank."""

    on_exhausted: OnExhausted
    """What happens when the first rank runs out of inputs."""

    divides_by_count: bool
    """Whether gradients are divided by the number of ranks that have inputs, not by the group's size."""

    counts_samples: bool
    """Whether the mean is over samples, not over ranks."""


def check_on_exhausted(value: OnExhausted | None, *, throws: bool) -> OnExhausted:
    """What ``on_exhausted`` and ``throw_on_early_termination`` mean together.

    Raises:
        ConfigurationError: an unknown value, or the two contradict each other.
    """
    check_flag("throw_on_early_termination", throws)
    if value is None:
        return "raise" if throws else "shadow"
    if not is_one_of(value, *get_args(OnExhausted)):
        raise ConfigurationError(f"on_exhausted is one of {', '.join(get_args(OnExhausted))}, got {told(value)}")
    if throws and value != "raise":
        raise ConfigurationError(f"throw_on_early_termination=True is on_exhausted='raise', but that is {value!r}")
    return value
