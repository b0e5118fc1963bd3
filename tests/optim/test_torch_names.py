"""The functional optimizers beside the `torch.optim` classes of their names."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness import assert_parity
from harness.models import MLP
from overlap import ConfigurationError, optim
from overlap.optim import FunctionalAdam, FunctionalSGD

OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True}}
NAMES = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop")
EVERY_OPTIMIZER = pytest.mark.parametrize("name", NAMES)


def _pair(name: str, parameters: Any) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    """The functional optimizer with `parameters`, then a model and torch's optimizer for it."""
    options, theirs = OPTIONS.get(name, {"lr": 0.01}), MLP.model()
    functional = getattr(optim, f"Functional{name}")(parameters, **options)
    return functional, theirs, getattr(torch.optim, name)(theirs.parameters(), **options)


def _steps(model: nn.Module, *optimizers: Any) -> Iterator[list[Tensor | None]]:
    """The gradients of four steps, one of them without its second; the rates are halved after each step."""
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        gradients: list[Tensor | None] = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
        if step == 2:
            gradients[1] = None
        yield gradients
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] *= 0.5


def _step_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: list[Tensor | None]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


@EVERY_OPTIMIZER
def test_step_equals_torchs_step_in_parameters_and_state(name: str) -> None:
    ours = MLP.model()
    functional, theirs, plain = _pair(name, ours.parameters())
    for gradients in _steps(theirs, functional, plain):
        _step_plainly(theirs, plain, gradients)
        functional.step(gradients)
    assert_parity(ours.state_dict(), theirs.state_dict(), what=f"Functional{name}.step")
    assert_parity(functional.state_dict(), plain.state_dict(), what=f"state of Functional{name}")


@EVERY_OPTIMIZER
def test_step_param_equals_torchs_step_for_parameters_that_come_late(name: str) -> None:
    ours = MLP.model()
    functional, theirs, plain = _pair(name, ())
    for gradients in _steps(theirs, functional, plain):
        _step_plainly(theirs, plain, gradients)
        for parameter, gradient in zip(ours.parameters(), gradients, strict=True):
            functional.step_param(parameter, gradient)
    assert_parity(ours.state_dict(), theirs.state_dict(), what=f"Functional{name}.step_param")


def test_step_needs_one_gradient_per_parameter() -> None:
    with pytest.raises(ConfigurationError, match="10 parameters but was given 1 gradients"):
        FunctionalAdam(MLP.model().parameters()).step([None])


def test_an_argument_that_torchs_class_does_not_take_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"FunctionalSGD: .*momentun"):
        FunctionalSGD(MLP.model().parameters(), lr=0.1, momentun=0.9)
