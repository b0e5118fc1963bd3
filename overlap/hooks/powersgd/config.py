"""The options of PowerSGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from overlap.errors import ConfigurationError

__all__ = ["PowerSGDConfig"]


@dataclass(frozen=True, kw_only=True)
class PowerSGDConfig:
    """The options of :class:`PowerSGD`, checked; the same on every rank."""

    rank: int = 2
    """Columns of each factor: an n x m matrix is sent as n x rank and m x rank numbers."""
    start_step: int = 0
    """Backward passes that are reduced exactly before compression begins."""
    min_compression_rate: float = 2.0
    """Compress a matrix only if its factors have fewer than 1/rate of its elements; 0 compresses all."""
    error_feedback: bool = True
    """Add what compression left out of a gradient to the next one."""
    warm_start: bool = True
    """Start each step from the factor of the step before, so that few steps find the leading directions."""
    alternate: bool = False
    """Send the left and the right factor in turn, one per step, instead of both."""
    error_dtype: torch.dtype | None = None
    """Dtype of the residuals; the gradient's own where ``None``."""
    bypass: Literal["auto"] | None = None
    """``"auto"``: measure for each bucket whether compressing and sending it is faster than sending it."""
    seed: int = 0
    """Seed of the random directions from which factors start."""
    epsilon: float = 0.0
    """Added to the length that each direction of a basis is divided by; 0 is exact and safe."""
    log_every_steps: int = 10_000
    """Steps between two lines of statistics in the log, once compression has begun."""

    def __post_init__(self) -> None:
        _check_integer("rank", self.rank, at_least=1)
        _check_integer("start_step", self.start_step, at_least=0)
        _check_integer("seed", self.seed, at_least=0)
        _check_integer("log_every_steps", self.log_every_steps, at_least=1)
        _check_number("min_compression_rate", self.min_compression_rate)
        _check_number("epsilon", self.epsilon)
        if self.bypass not in (None, "auto"):
            raise ConfigurationError(f'bypass must be None or "auto", got {self.bypass!r}')
        dtype = self.error_dtype
        if dtype is not None and dtype not in _ERROR_DTYPES:
            listed = ", ".join(map(str, _ERROR_DTYPES))
            raise ConfigurationError(f"error_dtype must be one of {listed} or None, got {dtype!r}")
        if self.alternate and not self.warm_start:
            raise ConfigurationError(
                "alternate=True computes each factor from the one of the step before, which warm_start=False "
                "throws away: use only one of the two"
            )

    def __str__(self) -> str:
        """The options as they would be typed, without defaults."""
        parts = [f"rank={self.rank}"]
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                parts.append(f"{name}={value!r}")
        return ", ".join(parts)


# torch does not add in narrower ones.
_ERROR_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _check_integer(name: str, value: object, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ConfigurationError(f"{name} must be a whole number of at least {at_least}, got {value!r}")


def _check_number(name: str, value: object) -> None:
    # The comparison is false for NaN too.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ConfigurationError(f"{name} must be a number of at least 0, got {value!r}")


_DEFAULTS = {
    name: field.default
    for name, field in PowerSGDConfig.__dataclass_fields__.items()
    if name not in ("rank", "log_every_steps")
}
