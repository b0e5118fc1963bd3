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

from overlap._torch.foreach import copy_all, subtract_from_
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.optim.subset import SubsetStepper, check_optimizer

__all__ = ["MakeOptimizer", "OuterOptimizer"]

MakeOptimizer = Callable[[list[Tensor]], Optimizer]


class OuterOptimizer:
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
        self._parameters = dict(parameters)
        self.anchors = {name: _widened(parameter.detach().clone(), dtype) for name, parameter in parameters.items()}
        """The parameters at the beginning of the round, by name."""
        try:
            self.optimizer = check_optimizer(make(list(self.anchors.values())))
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"outer could not be made from the model's parameters: {error}") from error
        self._stepper = SubsetStepper(self.optimizer)
        self.is_anchored = False

    def set_anchors(self) -> None:
        """Begin a round at the parameters as they are now."""
        copy_all(list(self.anchors.values()), [parameter.detach() for parameter in self._parameters.values()])
        self.is_anchored = True

    def restart(self) -> None:
        """Clear the optimizer's state; the next step begins a round at the parameters as they are then."""
        self.optimizer.state.clear()
        self.is_anchored = False

    def to_average(self, names: Sequence[str]) -> list[Tensor]:
        """The parameters, to be averaged in place and given to :meth:`step`; copies only where the dtype differs."""
        return [self._parameters[name].detach().to(self.anchors[name].dtype) for name in names]

    @torch.no_grad()
    def step(self, names: Sequence[str], means: Sequence[Tensor]) -> list[Tensor]:
        """Step some parameters, given their means over ranks, which are overwritten; returns the new values."""
        anchors = [self.anchors[name] for name in names]
        subtract_from_(means, anchors)
        self._stepper.begin()
        self._stepper.step(anchors, means)
        return anchors

    def write(self, names: Sequence[str]) -> None:
        """Copy the new values into the parameters."""
        copy_all([self._parameters[name].detach() for name in names], [self.anchors[name] for name in names])

    def state_dict(self) -> dict[str, Any]:
        """The outer optimizer's state and the parameters at the beginning of the round."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "anchors": dict(self.anchors) if self.is_anchored else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        anchors = state["anchors"]
        if anchors and anchors.keys() != self.anchors.keys():
            raise ConfigurationError("the outer optimizer's state is of a model with other parameters")
        self.optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            copy_all([self.anchors[name] for name in anchors], list(anchors.values()))
        self.is_anchored = bool(anchors)


def _widened(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not tensor.is_floating_point() or dtype.itemsize <= tensor.dtype.itemsize:
        return tensor
    return tensor.to(dtype)
