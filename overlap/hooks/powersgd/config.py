"""The options of PowerSGD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from overlap._checks import as_number, check_flag, check_whole_number, told
from overlap.errors import ConfigurationError
from overlap.hooks.wires import Wire

__all__ = ["PowerSGDConfig"]

# torch does not add in narrower ones.
_ERROR_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class PowerSGDConfig:
    """The options of :class:`PowerSGD`, which describes them; checked, and the same on every rank."""

    rank: int = 2
    start_step: int = 0
    min_compression_rate: float = 2.0
    error_feedback: bool = True
    warm_start: bool = True
    alternate: bool = False
    error_dtype: torch.dtype | None = None
    wire: Wire | None = None
    seed: int = 0
    epsilon: float = 0.0
    log_every_steps: int = 10_000

    def __post_init__(self) -> None:
        _check_rank(self.rank)
        check_whole_number("start_step", self.start_step, least=0)
        check_whole_number("seed", self.seed, least=0)
        check_whole_number("log_every_steps", self.log_every_steps, least=1)
        for flag in ("error_feedback", "warm_start", "alternate"):
            check_flag(flag, getattr(self, flag))
        for number in ("min_compression_rate", "epsilon"):
            _check_number(number, getattr(self, number))
        if self.wire is not None and not isinstance(self.wire, Wire):
            raise ConfigurationError(f"wire must be a Wire such as Int8(), or None, got {told(self.wire)}")
        dtype = self.error_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in _ERROR_DTYPES):
            listed = ", ".join(map(str, _ERROR_DTYPES))
            raise ConfigurationError(f"error_dtype must be one of {listed} or None, got {told(dtype)}")
        if self.alternate and not self.warm_start:
            raise ConfigurationError(
                "alternate=True computes each factor from the one of the step before, which warm_start=False "
                "throws away: use only one of the two"
            )

    def __str__(self) -> str:
        """The options as they would be typed, without defaults."""
        parts = [f"rank={self.rank!r}"]
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name not in ("rank", "log_every_steps") and value != option.default:
                parts.append(f"{option.name}={value!r}")
        return ", ".join(parts)

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of ``dtype`` are multiplied."""
        return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    def residual_dtype(self, dtype: torch.dtype) -> torch.dtype | None:
        """The dtype of residuals of gradients of ``dtype``; ``None`` without error feedback."""
        return (self.error_dtype or dtype) if self.error_feedback else None


def _check_rank(rank: object) -> None:
    if callable(rank) or isinstance(rank, Mapping):
        raise ConfigurationError(
            f"rank is {told(rank)}: give a whole number such as 2, the same in all steps; for another rank of some "
            'parameters write route({"*.embedding.weight": PowerSGD(rank=8), "*": PowerSGD(rank=2)})'
        )
    check_whole_number("rank", rank, least=1)


def _check_number(name: str, value: object) -> None:
    number = as_number(value)
    # The comparison is false for NaN too.
    if number is None or not 0 <= number < float("inf"):
        raise ConfigurationError(f"{name} must be a number of at least 0, got {told(value)}")
