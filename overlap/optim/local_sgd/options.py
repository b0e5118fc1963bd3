"""What a :class:`LocalSGD` is asked to do, checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from overlap.errors import ConfigurationError
from overlap.hooks.post_local_sgd import check_member
from overlap.optim.local_sgd.averagers import whole

__all__ = ["Options", "check_subgroup"]

_STATES = ("keep", "average", "reset")


@dataclass(frozen=True, kw_only=True)
class Options:
    """See :class:`LocalSGD`.

    Raises:
        ConfigurationError: a value is out of range, or two do not fit together.
    """

    overlap: int
    fragments: int
    average_buffers: bool
    optimizer_state: str
    average_dtype: torch.dtype | None

    def __post_init__(self) -> None:
        # overlap=True is a step.
        whole("overlap", int(self.overlap) if isinstance(self.overlap, bool) else self.overlap, least=0)
        whole("fragments", self.fragments, least=1)
        if self.optimizer_state not in _STATES:
            raise ConfigurationError(f"optimizer_state is one of {', '.join(_STATES)}, got {self.optimizer_state!r}")
        if self.overlap and self.optimizer_state == "average":
            raise ConfigurationError(
                'optimizer_state="average" needs all ranks to stop and average, which overlap=True is there to avoid; '
                'use "keep" or "reset"'
            )
        dtype = self.average_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigurationError(f"average_dtype is a floating-point dtype such as torch.float32, got {dtype!r}")

    @property
    def delay(self) -> int:
        """Steps from the beginning of an average to its end."""
        return int(self.overlap)

    @property
    def summary(self) -> str:
        """What differs from the usual, in the same words on every rank."""
        parts = [f"overlap {self.delay}"] if self.overlap else []
        parts += [f"{self.fragments} fragments"] if self.fragments > 1 else []
        parts += [] if self.average_buffers else ["buffers kept"]
        parts += [f"state {self.optimizer_state}"] if self.optimizer_state != "keep" else []
        parts += [f"in {str(self.average_dtype).removeprefix('torch.')}"] if self.average_dtype is not None else []
        return "".join(f", {part}" for part in parts)


def check_subgroup(subgroup: object, group: dist.ProcessGroup) -> None:
    """Raises: ConfigurationError: this rank is not in ``subgroup``, or it has ranks that do not train the model."""
    if subgroup is None or subgroup == "machine":
        return
    if isinstance(subgroup, str):
        raise ConfigurationError(f'subgroup is a process group, "machine" or None, got {subgroup!r}')
    check_member(subgroup)
    assert isinstance(subgroup, dist.ProcessGroup)
    members = set(dist.get_process_group_ranks(subgroup))
    if strangers := sorted(members - set(dist.get_process_group_ranks(group))):
        raise ConfigurationError(f"ranks {strangers} of the subgroup are not in the model's process group")
