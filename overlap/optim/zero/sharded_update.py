"""What a sharded optimizer asks of the stage that updates it in backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from overlap.hooks.transforms.clip import Clipping
from overlap.optim.grad_scaler import LossScale
from overlap.optim.lifecycle import UpdateLifecycle

__all__ = ["ShardedUpdate"]


class ShardedUpdate(Protocol):
    """What the optimizer asks of the stage that updates it in backward."""

    lifecycle: UpdateLifecycle
    is_deferred: bool

    @property
    def updates_in_step(self) -> bool:
        """Whether the update is made in the optimizer's ``step()``."""

    @property
    def gathers_differences(self) -> bool:
        """Whether the gather writes the parameters on the ranks that own them, too."""

    def check_covers(self, parameters: Sequence[Tensor], names: Sequence[str]) -> None:
        """Raises: ConfigurationError: the stage's model does not train one of ``parameters``."""

    def step(self, loss_scale: LossScale) -> None:
        """Do what is left of the step after backward."""

    def clip_(self, clipping: Clipping, *, foreach: bool | None) -> Tensor:
        """Clip the gradients that :meth:`step` is going to apply; returns the global norm."""

    def step_replayed(self) -> None:
        """The same on a rank that has run out of inputs."""

    def wait(self) -> None:
        """Wait for gathers that are under way."""
