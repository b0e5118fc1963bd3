"""Which options AdamW in eight bits takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from overlap._checks import as_number, check_flag, described, told
from overlap._torch.device import has_streams
from overlap.errors import ConfigurationError, UnsupportedError

__all__ = ["REFUSED", "check_options", "refuse_options"]

# Then vectorized kernels treat a block in any part as in the whole, see [Note: ownership].
_BLOCK_MULTIPLE = 64

REFUSED = {
    "amsgrad": "it would need a third moment",
    "foreach": "it updates some blocks after others",
    "capturable": "the host decides how many blocks are updated at a time",
    "differentiable": "codes have no derivative",
    "fused": "it updates some blocks after others",
}
"""Options of :class:`torch.optim.AdamW`, and why there are none such."""


def refuse_options(**options: Any) -> None:
    """Raises: UnsupportedError: one of ``options``, which are of :data:`REFUSED`, is set."""
    for option, value in options.items():
        if value is not None and value is not False:
            raise UnsupportedError(f"AdamW8bit has no {option}={told(value)} ({REFUSED[option]}): leave it out")


def check_options(options: Mapping[str, Any]) -> None:
    """Raises: ConfigurationError: an option of a group is out of range."""
    lr, betas = options["lr"], options["betas"]
    if isinstance(lr, Tensor) and (lr.numel() != 1 or lr.is_complex() or has_streams(lr.device)):
        raise ConfigurationError(f"lr is a number, or a tensor of one on the CPU, got {described(lr)}")
    rate = float(lr) if isinstance(lr, Tensor) else lr
    for name, value in (("lr", rate), ("eps", options["eps"]), ("weight_decay", options["weight_decay"])):
        if (number := as_number(value)) is None or not number >= 0:
            raise ConfigurationError(f"{name} is a number of at least 0, got {told(value)}")
    if not _are_betas(betas):
        raise ConfigurationError(f"betas are two numbers of at least 0 and below 1, got {told(betas)}")
    check_flag("maximize", options["maximize"])
    block_numel, min_numel = options["block_numel"], options["min_numel"]
    if not _is_count(block_numel, least=1) or block_numel % _BLOCK_MULTIPLE:
        raise ConfigurationError(f"block_numel is a multiple of {_BLOCK_MULTIPLE}, got {told(block_numel)}")
    if not _is_count(min_numel, least=0):
        raise ConfigurationError(f"min_numel is a number of elements, got {told(min_numel)}")


def _are_betas(betas: object) -> bool:
    numbers = [as_number(beta) for beta in betas] if isinstance(betas, Sequence) else []
    return len(numbers) == 2 and all(number is not None and 0 <= number < 1 for number in numbers)


def _is_count(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
