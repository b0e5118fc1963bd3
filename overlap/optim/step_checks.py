"""What a :class:`Step` refuses when it is made and when it is registered."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from overlap.errors import ConfigurationError
from overlap.hooks import StageContext
from overlap.optim.declared import check_nothing_before, check_one_eps, check_unit
from overlap.optim.overlapped import OverlappedOptimizer

__all__ = ["check_coverage", "check_in_backward", "check_params", "instead_of_step"]


def check_params(only: Mapping[int, Tensor] | None, optimizer: OverlappedOptimizer, *, is_deferred: bool) -> None:
    """Raises: ConfigurationError: backward cannot update ``only`` these parameters, which are given by ``id``."""
    if only is None:
        return
    if not only:
        raise ConfigurationError("params is empty: nothing would be updated; leave it out to update all")
    if any(not optimizer.stepper.covers(parameter) for parameter in only.values()):
        raise ConfigurationError(f"params has parameters that the {_name(optimizer)} does not have")
    if is_deferred:
        raise ConfigurationError("params chooses what is updated in backward, but deferred updates come after it")


def check_coverage(
    context: StageContext, optimizer: OverlappedOptimizer, *, is_automatic: bool, updates_all: bool
) -> None:
    """Raises: ConfigurationError: ``optimizer`` has none of the model's parameters, or some that nothing would update.

    Args:
        context: with the model's parameters.
        optimizer: what updates.
        is_automatic: whether the loop calls no ``step()``, which would update the others.
        updates_all: whether all parameters of the optimizer are to be updated.
    """
    if context.names is None:
        return
    optimizer.stepper.refresh()
    of_model = set(map(id, context.names))
    of_optimizer = [p for group in optimizer.param_groups for p in group["params"]]
    outside = [p for p in of_optimizer if id(p) not in of_model and p.requires_grad]
    if of_model.isdisjoint(map(id, of_optimizer)):
        raise ConfigurationError(
            f"the {_name(optimizer)} has no parameter of this model; build it from ddp.parameters()"
        )
    if outside and is_automatic and updates_all:
        raise ConfigurationError(
            f"{len(outside)} parameters of the {_name(optimizer)} are not in this model, so backward would "
            "never update them; give OverlappedOptimizer(optimizer) to Step and call its step()"
        )


def check_in_backward(optimizer: OverlappedOptimizer, *, is_deferred: bool) -> None:
    """Raises: UnsupportedError: an update in backward need not equal one whole step. See [Note: known or declared]."""
    plain, instead = optimizer.optimizer, "Step(OverlappedOptimizer(optimizer), deferred=True)"
    check_unit(plain, instead=instead)
    if not is_deferred:
        check_nothing_before(plain)
        check_one_eps(plain, instead=instead)


def instead_of_step(*, is_automatic: bool) -> str:
    """How the optimizer is stepped, and what to call in place of its own ``step()``."""
    if not is_automatic:
        return (
            "by the OverlappedOptimizer that wraps it, and its own step() would apply the gradients again: call "
            "step() of the OverlappedOptimizer"
        )
    return (
        "inside backward, and step() would apply the gradients again: leave the call out, or give "
        "OverlappedOptimizer(optimizer) to Step and call that one's step() (with GradScaler, together with "
        "deferred=True)"
    )


def _name(optimizer: OverlappedOptimizer) -> str:
    return type(optimizer.optimizer).__name__
