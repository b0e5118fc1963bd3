"""The optimizer that averages, as a proxy of the one or the several that update."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import described
from overlap._torch import classes
from overlap._torch.optimizer import mark_stepped, runs_step_hooks, step_without_hooks, unwrapped, without_init
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.optim.optimizer import OptimizerProxy
from overlap.optim.stepper import Verdict

__all__ = ["AveragingOptimizer", "SeveralOptimizers"]


class SeveralOptimizers(Optimizer):
    """Steps optimizers of disjoint parameters one after the other, each with its own groups, state and step hooks.

    A closure is evaluated once, before the first of them.
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
                raise UnsupportedError(f"{type(optimizer).__name__}.step() needs a closure: give this optimizer alone")
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
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
        """That of all, by parameter, to read."""
        return {parameter: state for optimizer in self.optimizers for parameter, state in optimizer.state.items()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise ConfigurationError(f"{self!r}: add the group to the optimizer that is to step it")

    def state_dict(self) -> dict[str, Any]:
        """``{"optimizers": [...]}``, one for each."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        saved = state_dict.get("optimizers", ())
        if len(saved) != len(self.optimizers):
            raise ConfigurationError(
                f"the state is of {len(saved) or 1} optimizers, and here are {len(self.optimizers)} ({self!r}): "
                "load it with the optimizers of the run that was saved"
            )
        for optimizer, one in zip(self.optimizers, saved, strict=True):
            optimizer.load_state_dict(one)

    def __repr__(self) -> str:
        return " + ".join(type(optimizer).__name__ for optimizer in self.optimizers)


class AveragingOptimizer(OptimizerProxy):
    """A proxy whose ``step`` calls :meth:`step_wrapped`, and then averages even where that skipped its update."""

    def __init__(self, optim: Optimizer | Sequence[Optimizer]) -> None:
        if isinstance(optim, (list, tuple)):
            super().__init__(SeveralOptimizers([self._checked(one) for one in optim]))
        else:
            super().__init__(self._checked(optim))

    def _checked(self, optim: Any) -> Optimizer:
        optim, name = unwrapped(optim), type(self).__name__
        if not isinstance(optim, Optimizer):
            raise ConfigurationError(
                f"{name} takes an optimizer, got {described(optim)}; make it first, as in "
                "torch.optim.SGD(ddp.parameters(), lr=0.1)"
            )
        if not runs_step_hooks(optim):
            raise ConfigurationError(
                f"{type(optim).__name__} runs no step hooks; give {name} the optimizer that it wraps"
            )
        if isinstance(optim, classes.ZeroRedundancyOptimizer):
            raise UnsupportedError(
                f"{name} lets each rank train alone between averages, and {described(optim)} updates on "
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
        verdict = Verdict.given_to(self)
        if verdict.is_supported_by(self.optimizer):
            with verdict.passed_to(self.optimizer):
                return self._step(closure)
        if verdict.skips(self.optimizer):
            return None
        verdict.unscale_([p.grad for group in self.param_groups for p in group["params"] if p.grad is not None])
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        # The step hooks of the wrapped optimizer are this one's, and run around the whole.
        result = step_without_hooks(self.optimizer, *(() if closure is None else (closure,)))
        mark_stepped(self.optimizer)
        return result

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigurationError(f"{type(self).__name__} belongs to its process group; save its state_dict() instead")
