"""PyTorch's names of functional optimizers: those of ``torch.optim``, with gradients as arguments of ``step``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import as_list, type_name
from overlap.errors import ConfigurationError, OverlapError
from overlap.optim.stepper import SubsetStepper


class FunctionalOptimizer:
    """Base of the functional optimizers.

    Each wraps the ``torch.optim`` class of its name: same arguments, same arithmetic, and the groups' hyperparameters
    read at every call. With ``FunctionalAdagrad`` a parameter that is added late starts at its first step.

    Args:
        params: parameters or groups of them, as for any optimizer; may be empty, since :meth:`step_param` adds what it
            has not seen.
        **defaults: arguments of the wrapped class.

    Raises:
        ConfigurationError: an argument that the wrapped class does not take, or a value that it refuses.

    >>> parameter = torch.ones(2)
    >>> FunctionalSGD([parameter], lr=0.5).step([torch.ones(2)])
    >>> parameter
    tensor([0.5000, 0.5000])
    """

    optimizer_class: ClassVar[type[Optimizer]]

    def __init_subclass__(cls, of: type[Optimizer] | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        if of is not None:
            cls.optimizer_class = of
        example = f">>> {cls.__name__}([torch.ones(2)], lr=0.5).step([torch.ones(2)])"
        cls.__doc__ = f"{cls.__doc__}\n\n{example}\n"

    def __init__(self, params: Iterable[Any] = (), **defaults: Any) -> None:
        if (groups := as_list(params)) is None:
            raise ConfigurationError(
                f"{type(self).__name__}: params is an iterable of parameters or of groups, got {type_name(params)}; "
                "pass ddp.parameters(), or [parameter]"
            )
        defaults.pop("_allow_empty_param_list", None)  # Accepted for compatibility; empty lists are always allowed.
        # An optimizer refuses an empty list of parameters, but not a group that has none yet.
        try:
            self.optimizer = self.optimizer_class(groups or [{"params": []}], **defaults)
        except OverlapError:
            raise
        except Exception as error:
            raise ConfigurationError(f"{type(self).__name__}: {error}") from error
        self._stepper = SubsetStepper(self.optimizer)
        self.adopts = not any(group["params"] for group in self.param_groups)
        """Whether this takes all parameters that an update in backward brings, as it was made without any."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups, with their hyperparameters; change them between calls."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:
        """The state of each parameter."""
        return self.optimizer.state

    def step_param(self, param: Tensor, grad: Tensor | None) -> None:
        """Update one parameter with ``grad``, of its shape and dtype; ``None`` leaves it as it is.

        A parameter that is in no group yet joins the first one.
        """
        if grad is None:
            return
        self.adopt([param])
        self._step([param], [grad])

    def adopt(self, params: Iterable[Tensor]) -> None:
        """Let those of ``params`` that are in no group yet join the first one."""
        self.param_groups[0]["params"].extend(param for param in params if not self._stepper.covers(param))
        self._stepper.refresh()

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Update all parameters, the groups' in their order; where the gradient is ``None``, not at all.

        Raises:
            ConfigurationError: ``gradients`` does not have one per parameter.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if len(parameters) != len(gradients):
            raise ConfigurationError(
                f"{type(self).__name__} has {len(parameters)} parameters but was given {len(gradients)} gradients; "
                "pass one per parameter, None for those to leave alone"
            )
        pairs = [(parameter, grad) for parameter, grad in zip(parameters, gradients, strict=True) if grad is not None]
        self._step([parameter for parameter, _ in pairs], [grad for _, grad in pairs])

    @torch.no_grad()
    def _step(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        self._stepper.begin()
        self._stepper.step(parameters, gradients)
        self._stepper.finish()

    def state_dict(self) -> dict[str, Any]:
        """That of the ``torch.optim`` class, which can load it."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this or the ``torch.optim`` class gave."""
        self.optimizer.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"


class FunctionalSGD(FunctionalOptimizer, of=torch.optim.SGD):
    """``torch.optim.SGD`` with gradients as arguments."""


class FunctionalAdam(FunctionalOptimizer, of=torch.optim.Adam):
    """``torch.optim.Adam`` with gradients as arguments."""


class FunctionalAdamW(FunctionalOptimizer, of=torch.optim.AdamW):
    """``torch.optim.AdamW`` with gradients as arguments."""


class FunctionalAdagrad(FunctionalOptimizer, of=torch.optim.Adagrad):
    """``torch.optim.Adagrad`` with gradients as arguments."""


class FunctionalAdadelta(FunctionalOptimizer, of=torch.optim.Adadelta):
    """``torch.optim.Adadelta`` with gradients as arguments."""


class FunctionalAdamax(FunctionalOptimizer, of=torch.optim.Adamax):
    """``torch.optim.Adamax`` with gradients as arguments."""


class FunctionalRMSprop(FunctionalOptimizer, of=torch.optim.RMSprop):
    """``torch.optim.RMSprop`` with gradients as arguments."""


class FunctionalRprop(FunctionalOptimizer, of=torch.optim.Rprop):
    """``torch.optim.Rprop`` with gradients as arguments."""
