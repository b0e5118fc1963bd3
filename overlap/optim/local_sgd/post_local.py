"""The optimizer of post-local SGD, under PyTorch's name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from overlap.errors import ConfigurationError
from overlap.optim.local_sgd.averagers import ModelAverager
from overlap.optim.local_sgd.wrapper import OptimizerAround

__all__ = ["PostLocalSGDOptimizer"]


class PostLocalSGDOptimizer(OptimizerAround):
    """Steps an optimizer and then lets an averager average its parameters, when it is time (arXiv 1808.07217).

    Register ``post_localSGD_hook`` with DDP, and give its state and the averager the same start, as with PyTorch's;
    :class:`LocalSGD` does all of it from one counter. ``param_groups``, ``state``, ``defaults`` and step hooks are the
    wrapped optimizer's at all times. With ``GradScaler`` a step that is skipped still averages when its turn comes.

    Args:
        optim: the optimizer, not a class.
        averager: says when to average, and over which ranks.

    Issues: what ``averager`` issues, in :meth:`step`.

    Raises:
        ConfigurationError: one of them is something else.
    """

    def __init__(self, optim: Optimizer, averager: ModelAverager) -> None:
        if not hasattr(averager, "average_parameters") or not hasattr(averager, "step") or isinstance(averager, type):
            raise ConfigurationError(
                f"PostLocalSGDOptimizer takes a ModelAverager, got {averager!r}; make one, as in "
                "PeriodicModelAverager(period=8, warmup_steps=1000)"
            )
        super().__init__(optim)
        self.averager = averager

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update, then average if it is time; returns the closure's result."""
        loss = self.step_inner(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, with the averager's ``step`` beside it."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` or the plain optimizer gave; warns where there is no ``step``."""
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key != "step"})
        if "step" not in state_dict:
            warnings.warn(
                "the state has no step of an averager: it starts again from step 0, its warm-up included",
                UserWarning,
                stacklevel=2,
            )
        self.averager.step = state_dict.get("step", 0)

    def __repr__(self) -> str:
        return f"PostLocalSGDOptimizer({self.optim!r})"
