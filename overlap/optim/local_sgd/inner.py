"""The optimizers inside of one that averages: one, or several that are stepped in turn."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import refuse_capture, type_name
from overlap._torch import classes
from overlap._torch.optimizer import mark_stepped, runs_step_hooks, step_without_hooks, unwrapped, without_init
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.optim.optimizer import OptimizerProxy, evaluated
from overlap.optim.stepper import FoundInf, check_optimizer


class SeveralOptimizers(Optimizer):
    """Steps optimizers of disjoint parameters one after the other, each with its own groups, state and step hooks."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        without_init(self)
        self.optimizers = tuple(optimizers)
        if not self.optimizers:
            raise ConfigurationError("the list of optimizers is empty; give those that step the model's parameters")
        owners: dict[Tensor, Optimizer] = {}
        for optimizer in self.optimizers:
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                if owners.setdefault(parameter, optimizer) is not optimizer:
                    raise ConfigurationError(
                        f"{type(owners[parameter]).__name__} and {type(optimizer).__name__} both have a parameter of "
                        f"shape {tuple(parameter.shape)}, which would be stepped twice: give it to one of them"
                    )

    def step(self) -> None:  # type: ignore[override]
        """One step of each."""
        for optimizer in self.optimizers:
            optimizer.step()

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
        """Load a state that :meth:`state_dict` returned."""
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
    """A proxy whose ``step`` steps an optimizer, and then averages parameters if it is time."""

    is_stepping = False
    """Whether it steps the optimizer that it wraps, whose ``step`` nobody else may call where that is guarded."""

    def __init__(self, optim: Optimizer | Sequence[Optimizer]) -> None:
        if isinstance(optim, (list, tuple)):
            super().__init__(SeveralOptimizers([self._checked(one) for one in optim]))
        else:
            super().__init__(self._checked(optim))

    def _checked(self, given: Any) -> Optimizer:
        name, optim = type(self).__name__, check_optimizer(unwrapped(given))
        if not runs_step_hooks(optim):
            raise ConfigurationError(
                f"{type(optim).__name__} runs no step hooks; give {name} the optimizer that it wraps"
            )
        if isinstance(optim, classes.ZeroRedundancyOptimizer):
            raise UnsupportedError(
                f"{name} lets each rank train alone between averages, and {type_name(optim)} updates on "
                "each rank a part of the parameters for all ranks: give it the plain optimizer"
            )
        if isinstance(optim, AveragingOptimizer | classes.PostLocalSGDOptimizer):
            raise ConfigurationError(f"this {type_name(optim)} averages already; use it as it is")
        return optim

    @property
    def optim(self) -> Optimizer:
        """The optimizer that updates parameters."""
        return self.optimizer

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's parameters, then average if it is time, even where ``GradScaler`` skips the update.

        Args:
            closure: evaluates the model and runs backward, once; its result is returned.

        Raises:
            UnsupportedError: a CUDA graph is being captured.
        """
        refuse_capture(f"{type(self).__name__}.step()", "call it outside of the capture")
        loss = None if closure is None else evaluated(closure)
        self._step_and_average()
        return loss

    @abstractmethod
    def _step_and_average(self) -> None:
        """The part of :meth:`step` after the closure; calls :meth:`step_wrapped`."""

    def step_wrapped(self) -> None:
        """One step of the wrapped optimizer, which ``GradScaler`` may unscale or skip."""
        verdict = FoundInf.given_to(self)
        if verdict.is_supported_by(self.optimizer):
            with verdict.passed_to(self.optimizer):
                self._step()
        elif not verdict.skips(self.optimizer):
            verdict.unscale_([p.grad for group in self.param_groups for p in group["params"] if p.grad is not None])
            self._step()

    def _step(self) -> None:
        # The step hooks of the wrapped optimizer are this one's, and run around the whole.
        self.is_stepping = True
        try:
            step_without_hooks(self.optimizer)
        finally:
            self.is_stepping = False
        mark_stepped(self)

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigurationError(f"{type(self).__name__} belongs to its process group; save its state_dict() instead")
