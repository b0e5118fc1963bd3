"""An optimizer that stands for another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from overlap._torch.optimizer import patch_step

__all__ = ["OptimizerProxy"]


class OptimizerProxy(Optimizer):
    """Shares everything with the optimizer that it wraps: groups, state, defaults and step hooks, at all times.

    A subclass has a ``step`` of its own; its step hooks, which are the wrapped optimizer's, run around that.
    """

    # GradScaler then leaves gradients as they are, always calls step, and says there whether they are finite.
    _step_supports_amp_scaling = True

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        """The wrapped optimizer."""
        patch_step(self)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # Not set yet: a copy or an unpickled object in the making.
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state, by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As the wrapped optimizer's."""
        self.optimizer.load_state_dict(dict(state_dict))
