"""An optimizer that steps the one that it wraps, and averages parameters afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from overlap._checks import described
from overlap._torch import classes
from overlap._torch.optimizer import mark_stepped, runs_step_hooks, step_without_hooks, unwrapped
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.optim.local_sgd.several import SeveralOptimizers
from overlap.optim.optimizer import OptimizerProxy
from overlap.optim.scaler import LossScale

__all__ = ["AveragingOptimizer"]


class AveragingOptimizer(OptimizerProxy):
    """A proxy whose ``step`` calls :meth:`step_wrapped`, and then averages even where that skipped its update."""

    def __init__(self, optim: Optimizer | Sequence[Optimizer]) -> None:
        if isinstance(optim, (list, tuple)):
            super().__init__(SeveralOptimizers([self._checked(one) for one in optim]))
        else:
            super().__init__(self._checked(optim))

    def _checked(self, optim: Any) -> Optimizer:
        """Raises: ConfigurationError, UnsupportedError: it is not an optimizer that ranks can step alone."""
        optim = unwrapped(optim)
        if not isinstance(optim, Optimizer):
            raise ConfigurationError(
                f"{type(self).__name__} takes an optimizer, got {described(optim)}; make it first, as in "
                "torch.optim.SGD(ddp.parameters(), lr=0.1)"
            )
        if not runs_step_hooks(optim):
            raise ConfigurationError(
                f"{type(optim).__name__} runs no step hooks; give {type(self).__name__} the optimizer that it wraps"
            )
        if isinstance(optim, classes.ZeroRedundancyOptimizer):
            raise UnsupportedError(
                f"{type(self).__name__} lets each rank train alone between averages, and {described(optim)} updates on "
                "each rank a part of the parameters for all ranks: give it the plain optimizer"
            )
        if isinstance(optim, AveragingOptimizer | classes.PostLocalSGDOptimizer):
            raise ConfigurationError(f"this {described(optim)} averages already; use it as it is")
        return optim

    @property
    def optim(self) -> Optimizer:
        """The optimizer that updates parameters."""
        return self.optimizer

    def step_wrapped(self, closure: Callable[[], Any] | None) -> Any:
        """One step of the wrapped optimizer, which ``GradScaler`` may unscale or skip; returns the closure's result."""
        loss_scale = LossScale.given_to(self)
        if loss_scale.is_supported_by(self.optimizer):
            with loss_scale.passed_to(self.optimizer):
                return self._step(closure)
        if loss_scale.skips_step(self.optimizer):
            return None
        loss_scale.unscale_([p.grad for group in self.param_groups for p in group["params"] if p.grad is not None])
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        # The step hooks of the wrapped optimizer are this one's, and run around the whole.
        result = step_without_hooks(self.optimizer, *(() if closure is None else (closure,)))
        mark_stepped(self.optimizer)
        return result

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigurationError(f"{type(self).__name__} belongs to its process group; save its state_dict() instead")
