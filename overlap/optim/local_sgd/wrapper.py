"""The base of optimizers that wrap another one and act after each of its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._torch.foreach import scale_
from overlap._torch.optimizer import mark_stepped, patch_step, unhooked_step
from overlap.errors import ConfigurationError

__all__ = ["OptimizerAround"]


class OptimizerAround(Optimizer):
    """Shares groups, state, defaults and step hooks with the optimizer that it wraps.

    A subclass calls :meth:`step_inner` in its ``step``.
    """

    # GradScaler then always calls step, and stores in found_inf whether gradients are finite: a rank that skips its
    # update must still take part in the average.
    _step_supports_amp_scaling = True

    def __init__(self, optim: Optimizer) -> None:
        if not isinstance(optim, Optimizer):
            what = f"the class {optim.__name__}" if isinstance(optim, type) else repr(optim)
            raise ConfigurationError(
                f"{type(self).__name__} takes an optimizer, got {what}; make it first, as in "
                "torch.optim.SGD(ddp.parameters(), lr=0.1)"
            )
        self.optim = optim
        """The optimizer that updates parameters."""
        patch_step(self)

    def __getattr__(self, name: str) -> Any:
        if name == "optim":  # Not set yet: this is being copied or unpickled.
            raise AttributeError(name)
        return getattr(self.optim, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optim.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state, by parameter."""
        return self.optim.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optim.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optim.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's."""
        self.optim.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's."""
        self.optim.add_param_group(param_group)

    def step_inner(self, closure: Callable[[], Any] | None) -> Any:
        """Step the wrapped optimizer, unless ``GradScaler`` skips it; returns the closure's result."""
        found_inf: Tensor | None = self.__dict__.get("found_inf")
        scale: Tensor | None = self.__dict__.get("grad_scale")
        if found_inf is None:
            return self._step(closure)
        if getattr(self.optim, "_step_supports_amp_scaling", False):
            self.optim.grad_scale, self.optim.found_inf = scale, found_inf  # type: ignore[attr-defined]
            try:
                return self._step(closure)
            finally:
                del self.optim.grad_scale, self.optim.found_inf  # type: ignore[attr-defined]
        if found_inf.item():
            return None
        if scale is not None:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            with torch.no_grad():
                scale_(gradients, scale.double().reciprocal().float())
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        # Its step hooks are also this object's, and run around the whole step.
        step = unhooked_step(type(self.optim))
        result = step(self.optim) if closure is None else step(self.optim, closure)  # type: ignore[call-arg]
        mark_stepped(self.optim)
        return result

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigurationError(f"{type(self).__name__} belongs to its process group; save its state_dict() instead")
