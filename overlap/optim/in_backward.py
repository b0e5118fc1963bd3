"""Whether an optimizer's update can be made in backward: refused where it would not equal one whole step."""

from __future__ import annotations

import warnings

from torch.optim import Optimizer

from overlap._torch.optimizer import global_pre_hooks, own_step
from overlap.errors import UnsupportedError
from overlap.optim.probe import Separability, Verdict
from overlap.optim.step_guard import refused_pre_hooks

__all__ = ["check_draws", "check_in_turn", "check_nothing_before"]


def check_draws(optimizer: Optimizer, found: Separability, *, instead: str) -> None:
    """Raises: UnsupportedError: ``step()`` draws from a global generator, which backward draws from, too."""
    if found.draws:
        raise UnsupportedError(
            f"{type(optimizer).__name__}.step() draws random numbers ({', '.join(found.draws)}), and in backward they "
            f"would come in another order than in step(), between those of recomputed layers; use {instead}"
        )


def check_in_turn(optimizer: Optimizer, found: Separability, *, instead: str) -> None:
    """Warns where it cannot be known.

    Raises:
        UnsupportedError: updating some parameters after others is not the same as updating all at once.
    """
    check_nothing_before(optimizer)
    name, finding = type(optimizer).__name__, found.in_turn
    if finding.verdict is Verdict.COUPLED:
        raise UnsupportedError(
            f"updating bucket by bucket would not equal one step of {name}: {finding.why}; use {instead}"
        )
    if finding.verdict is Verdict.UNKNOWN:
        warnings.warn(
            f"cannot find out whether updating bucket by bucket equals one step of {name}: {finding.why}. It does if "
            f"each parameter is updated by itself; otherwise use {instead}",
            UserWarning,
            stacklevel=2,
        )


def check_nothing_before(optimizer: Optimizer) -> None:
    """Raises: UnsupportedError: something must run before the update, or in place of it."""
    name = type(optimizer).__name__
    if own_step(optimizer) is not None:
        raise UnsupportedError(
            f"step() of this {name} was replaced on the object, and an update in backward would not call it; use "
            "Step(OverlappedOptimizer(optimizer), deferred=True)"
        )
    if hooks := refused_pre_hooks(optimizer, global_pre_hooks()):
        raise UnsupportedError(
            f"the step pre-hook {hooks[0]} must run before the update of this {name}, when all gradients are there, "
            "but updates are made while backward runs; use Step(OverlappedOptimizer(optimizer), deferred=True)"
        )
