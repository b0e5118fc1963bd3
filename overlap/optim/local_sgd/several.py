"""Several optimizers of one model that are stepped together, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._torch.optimizer import without_init
from overlap.errors import ConfigurationError, UnsupportedError

__all__ = ["SeveralOptimizers", "name_of"]


class SeveralOptimizers(Optimizer):
    """Steps optimizers of disjoint parameters one after the other, each with its own groups, state and step hooks.

    A closure is evaluated once, before the first of them.

    Raises:
        ConfigurationError: there is none, or two of them have a parameter in common.
        UnsupportedError: one of them evaluates a closure itself.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        without_init(self)
        self.optimizers = tuple(optimizers)
        if not self.optimizers:
            raise ConfigurationError("the list of optimizers is empty; give those that step the model's parameters")
        owners: dict[Tensor, Optimizer] = {}
        for optimizer in self.optimizers:
            closure = inspect.signature(optimizer.step).parameters.get("closure")
            if closure is not None and closure.default is inspect.Parameter.empty:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} evaluates the model again inside step(closure), which several "
                    "optimizers evaluate once: give it alone"
                )
            for parameter in _parameters(optimizer):
                if owners.setdefault(parameter, optimizer) is not optimizer:
                    raise ConfigurationError(
                        f"{type(owners[parameter]).__name__} and {type(optimizer).__name__} both have a parameter of "
                        f"shape {tuple(parameter.shape)}, which would be stepped twice: give it to one of them"
                    )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of each; returns the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of all, in order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of all, by parameter."""
        return _States(self.optimizers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ConfigurationError(f"{name_of(self)}: add the group to the optimizer that is to step it")

    def state_dict(self) -> dict[str, Any]:
        """``{"optimizers": [...]}``, one for each."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        saved = state_dict.get("optimizers", ())
        if len(saved) != len(self.optimizers):
            raise ConfigurationError(
                f"the state is of {len(saved) or 1} optimizers, and here are {len(self.optimizers)} ({name_of(self)}): "
                "load it with the optimizers of the run that was saved"
            )
        for optimizer, one in zip(self.optimizers, saved, strict=True):
            optimizer.load_state_dict(one)


class _States(MutableMapping[Tensor, Any]):
    """The state of several optimizers, by parameter."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def __getitem__(self, parameter: Tensor) -> Any:
        for optimizer in self._optimizers:
            if parameter in optimizer.state:
                return optimizer.state[parameter]
        raise KeyError(parameter)

    def __setitem__(self, parameter: Tensor, state: Any) -> None:
        owner = next(each for each in self._optimizers if any(parameter is one for one in _parameters(each)))
        owner.state[parameter] = state

    def __delitem__(self, parameter: Tensor) -> None:
        for optimizer in self._optimizers:
            if parameter in optimizer.state:
                del optimizer.state[parameter]
                return
        raise KeyError(parameter)

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for optimizer in self._optimizers for parameter in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def name_of(optimizer: Optimizer) -> str:
    """The optimizer's class, or those of several."""
    several = optimizer.optimizers if isinstance(optimizer, SeveralOptimizers) else (optimizer,)
    return " + ".join(type(one).__name__ for one in several)
