"""The stages that update with one optimizer, each for a model of its own, and what they leave to ``step()``."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from overlap.errors import ConfigurationError, TrainingLoopError, UnsupportedError
from overlap.hooks import StageContext
from overlap.hooks.transforms.clip import Clipping
from overlap.optim.applied import PassGradients
from overlap.optim.declared import check_nothing_before
from overlap.optim.grad_scaler import LossScale
from overlap.optim.lifecycle import UpdateLifecycle
from overlap.optim.phases import SCALED_IN_BACKWARD, SCALED_UNDER_JOIN, Phase

__all__ = ["Registered", "RegisteredUpdate", "RegisteredUpdates"]


class RegisteredUpdate(Protocol):
    """What a :class:`Step` stage tells of itself."""

    is_deferred: bool
    may_skip: bool
    clipping: Clipping | None
    lifecycle: UpdateLifecycle
    context: StageContext | None

    @property
    def updates_in_step(self) -> bool: ...

    def check_unscaled(self) -> None: ...


class Registered(enum.Enum):
    """Whether stages update with an optimizer."""

    NEVER = "never"
    """None ever did, so nothing has averaged gradients over ranks."""
    NOW = "now"
    """One or more do."""
    BEFORE = "before"
    """All were removed, and the loop may go on with the optimizer alone."""


class RegisteredUpdates:
    """The stages that update with ``optimizer``, and what all of them together let ``step()`` do.

    Args:
        optimizer: the user's, inside of the :class:`OverlappedOptimizer`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.phase = Registered.NEVER
        self._optimizer = optimizer
        self._updates: list[RegisteredUpdate] = []

    def __iter__(self) -> Iterator[RegisteredUpdate]:
        return iter(self._updates)

    @property
    def lifecycles(self) -> list[UpdateLifecycle]:
        """Of each of them."""
        return [update.lifecycle for update in self._updates]

    # What a Step stage uses.

    def adopt(self, update: RegisteredUpdate) -> None:
        """Have ``step()`` finish what ``update`` leaves."""
        self._updates.append(update)
        self.phase = Registered.NOW

    def release(self, update: RegisteredUpdate) -> None:
        """Forget ``update``."""
        if update in self._updates:
            self._updates.remove(update)
            self.phase = Registered.NOW if self._updates else Registered.BEFORE

    def check_same_way(self, update: RegisteredUpdate) -> None:
        """Raises: ConfigurationError: another stage updates this optimizer in another way."""
        for other in self._updates:
            if (other.is_deferred, other.clipping) != (update.is_deferred, update.clipping):
                raise ConfigurationError(f"one optimizer is updated in one way, but has {other!r} and {update!r}")
            if (other.may_skip or update.may_skip) and not update.updates_in_step:
                raise UnsupportedError(
                    f"one optimizer serves two models, and where gradients of one are not finite {update!r} may have "
                    "updated the other already: use Step(optimizer, deferred=True) for both"
                )

    def outside_of_models(self) -> list[Tensor]:
        """Parameters that have a gradient, and that no registered model has."""
        lifecycles = self.lifecycles
        return [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
            and not any(parameter in one.names or one.gradients.has_reduced(parameter) for one in lifecycles)
        ]

    # What step() asks before it updates.

    def pending(self, loss_scale: LossScale, outside: PassGradients) -> list[Tensor]:
        """The parameters to update, if the lifecycles allow it."""
        self._check_registered()
        lifecycles = self.lifecycles
        if loss_scale.is_used and any(lifecycle.outcome is not Phase.REDUCED for lifecycle in lifecycles):
            raise TrainingLoopError(SCALED_IN_BACKWARD.format(deferred=lifecycles[0].form.deferred))
        if loss_scale.is_used and any(lifecycle.is_joining() for lifecycle in lifecycles):
            raise TrainingLoopError(SCALED_UNDER_JOIN)
        if loss_scale.is_used:
            for update in self._updates:
                update.check_unscaled()
        for lifecycle in lifecycles:
            lifecycle.check_step()
        applied = outside.left_ids.union(*(lifecycle.gradients.applied_ids for lifecycle in lifecycles))
        pending = [
            parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) not in applied and parameter.grad is not None
        ]
        for lifecycle in lifecycles:
            lifecycle.check_reduced(pending)
        is_all = not pending and all(lifecycle.phase is Phase.STEPPED for lifecycle in lifecycles)
        for lifecycle in lifecycles:
            lifecycle.check_once(is_all=is_all)
        return pending

    def _check_registered(self) -> None:
        if self.phase is not Registered.NEVER:
            return
        gradients = [p.grad for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        if any(bool(gradient.any()) for gradient in gradients):
            raise TrainingLoopError(
                f"no stage updates with this {type(self._optimizer).__name__}'s OverlappedOptimizer, so nothing has "
                "averaged its gradients over ranks: first call chain(AllReduce(), Step(optimizer)).register(ddp)"
            )

    def check_call(self, arguments: dict[str, Any]) -> None:
        """Raises: TrainingLoopError: the update was made in backward, but should have known ``arguments`` or a hook."""
        if all(update.lifecycle.phase is not Phase.APPLIED for update in self._updates):
            return
        check_nothing_before(self._optimizer)
        if arguments:
            raise TrainingLoopError(
                f"step() was given {', '.join(arguments)}, but the update was made in backward; use "
                "Step(optimizer, deferred=True)"
            )
