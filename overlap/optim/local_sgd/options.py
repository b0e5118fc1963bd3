"""How the model of a LocalSGD is averaged."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from overlap._checks import check_flag, check_whole_number, is_one_of, told
from overlap.errors import ConfigurationError
from overlap.hooks.wires import Wire
from overlap.optim.local_sgd.compressed import check_wire

__all__ = ["Options"]

_STATES = ("keep", "average", "reset")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is averaged; see :class:`LocalSGD`.

    Raises:
        ConfigurationError: a value is out of range, or two do not fit together.
    """

    overlap: int
    fragments: int
    average_buffers: bool
    optimizer_state: str
    average_dtype: torch.dtype | None
    wire: Wire | None
    error_feedback: bool

    def __post_init__(self) -> None:
        # overlap=True means one step.
        check_whole_number("overlap", int(self.overlap) if isinstance(self.overlap, bool) else self.overlap, least=0)
        check_whole_number("fragments", self.fragments, least=1)
        check_flag("average_buffers", self.average_buffers)
        if not is_one_of(self.optimizer_state, *_STATES):
            raise ConfigurationError(
                f"optimizer_state must be one of {', '.join(_STATES)}, got {told(self.optimizer_state)}"
            )
        if self.overlap and self.optimizer_state == "average":
            raise ConfigurationError(
                'optimizer_state="average" needs all ranks to stop and average, which overlap=True is there to avoid; '
                'use "keep" or "reset"'
            )
        dtype = self.average_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigurationError(
                f"average_dtype must be a floating-point dtype such as torch.float32, got {told(dtype)}"
            )
        check_wire(self.wire, error_feedback=self.error_feedback, dtype=dtype, dtype_is="average_dtype")

    @property
    def delay(self) -> int:
        """Steps from the beginning of an average to its end."""
        return int(self.overlap)

    @property
    def summary(self) -> str:
        """What differs from the defaults, in the same words on every rank."""
        parts = [f"overlap {self.delay}"] if self.overlap else []
        parts += [f"{self.fragments} fragments"] if self.fragments > 1 else []
        parts += [] if self.average_buffers else ["buffers kept"]
        parts += [f"state {self.optimizer_state}"] if self.optimizer_state != "keep" else []
        parts += [f"in {str(self.average_dtype).removeprefix('torch.')}"] if self.average_dtype is not None else []
        parts += [f"wire {self.wire!r}"] if self.wire is not None else []
        parts += ["error feedback"] if self.error_feedback else []
        return "".join(f", {part}" for part in parts)
