"""Outer optimizers, SlowMo and DiLoCo: they step with what a whole round changed as their gradient.

If all ranks began the round at the parameters ``x``, and ``m`` is the mean of what they have at its end, the outer
gradient is ``x - m``. SGD with rate 1 gives the plain average, SGD with momentum is SlowMo (Wang et al. 2019,
https://arxiv.org/abs/1910.00643), and Nesterov momentum is DiLoCo (Douillard et al. 2023,
https://arxiv.org/abs/2311.08105).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._torch.foreach import subtract_from_
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.optim.local_sgd.anchors import Anchors
from overlap.optim.subset import check_optimizer, grads_replaced, step_whole

__all__ = ["MakeOptimizer", "OuterOptimizer"]

MakeOptimizer = Callable[[list[Tensor]], Optimizer]


class OuterOptimizer(Anchors):
    """Keeps a copy of what all ranks had when the round began, and steps it.

    Args:
        make: makes the optimizer of a list of tensors.
        parameters: the model's, by name.
        dtype: keep and step in this dtype where it is wider.

    Raises:
        ConfigurationError: ``make`` does not make an optimizer that steps without a closure.
        UnsupportedError: a parameter is complex.
    """

    def __init__(self, make: MakeOptimizer, parameters: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
        if isinstance(make, Optimizer) or not callable(make):
            raise ConfigurationError(
                f"outer must be a function that makes an optimizer of tensors, got {type(make).__name__}; give "
                "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)"
            )
        if any(parameter.is_complex() for parameter in parameters.values()):
            raise UnsupportedError("outer does not step complex parameters; leave outer out, and they are averaged")
        super().__init__(parameters, dtype)
        try:
            made = make(list(self.values.values()))
        except ConfigurationError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"outer could not be made from the model's parameters: {error}") from error
        self.optimizer = check_optimizer(made)

    def restart(self) -> None:
        """Clear the optimizer's state; the next step begins a round at the parameters as they are then."""
        self.optimizer.state.clear()
        super().restart()

    @torch.no_grad()
    def step(self, names: Sequence[str], means: Sequence[Tensor]) -> list[Tensor]:
        """Step some parameters, given their means over ranks, which are overwritten; returns the new values."""
        anchors = [self.values[name] for name in names]
        subtract_from_(means, anchors)
        with grads_replaced(anchors, means):
            step_whole(self.optimizer)
        return anchors

    def state_dict(self) -> dict[str, Any]:
        """The outer optimizer's state and the parameters at the beginning of the round."""
        return {"optimizer": self.optimizer.state_dict(), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        super().load_state_dict(state)
        self.optimizer.load_state_dict(state["optimizer"])
