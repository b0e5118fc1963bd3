"""Copies to measure on, and originals that stay as they are."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overlap._torch.device import has_streams
from overlap._torch.optimizer import drop_hooks
from overlap.errors import ConfigurationError, UnsupportedError

__all__ = ["Originals", "Training", "generators_restored", "loss_of"]

_REMEDY = "choose on another run of the model, and give this one that plan: auto(..., plan=Plan.load(path))"


@dataclass(frozen=True)
class Training:
    """A model, its optimizer and its loss; all of them copies, or all the user's own."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[..., Any]

    @property
    def device(self) -> torch.device:
        """Of the trained parameters."""
        return next(parameter.device for parameter in self.model.parameters() if parameter.requires_grad)


class Originals:
    """What the user gave. Measuring uses :meth:`copied`; :meth:`check` raises if it has changed these all the same."""

    def __init__(self, own: Training) -> None:
        self.own = own
        named = [*own.model.named_parameters(), *own.model.named_buffers()]
        parameters = [parameter for group in own.optimizer.param_groups for parameter in group["params"]]
        names = dict.fromkeys(parameters, "a parameter of the optimizer") | {tensor: name for name, tensor in named}
        self._before = [(name, one, one._version, *_gradient(one)) for one, name in names.items()]

    def copied(self) -> Training:
        """Copies that share no memory with the originals, with a learning rate of 0, so that nothing diverges.

        Raises:
            UnsupportedError: something in them cannot be copied.
        """
        own = self.own
        try:
            model, optimizer, loss = copy.deepcopy((own.model, own.optimizer, own.loss))
        except Exception as error:
            raise UnsupportedError(
                f"model, optimizer or loss cannot be copied ({type(error).__name__}: {error}): {_REMEDY}"
            ) from error
        drop_hooks(optimizer)
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        return Training(model, optimizer, loss)

    def check(self) -> None:
        """Raises: UnsupportedError: measuring has reached the originals; their gradients are put back first."""
        changed = []
        for name, tensor, version, gradient, gradient_version in self._before:
            if tensor._version != version:
                changed.append(f"the values of {name!r}")
            now, now_version = _gradient(tensor)
            if now is not gradient or now_version != gradient_version:
                changed.append(f"a gradient of {name!r}")
                tensor.grad = gradient
        if changed:
            raise UnsupportedError(
                f"measuring on a copy of the model has changed {changed[0]} in the model itself: the loss or a hook "
                "reaches the model in another way than by its argument. Give a loss of output and target alone, a loss "
                f"that is a module or a method of one, which is copied, or {_REMEDY}"
            )


def _gradient(tensor: Tensor) -> tuple[Tensor | None, int]:
    gradient = tensor.grad if tensor.is_leaf else None
    return gradient, 0 if gradient is None else gradient._version


@contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """Within it random numbers may be drawn; afterwards all generators are where they were before."""
    numpy: Any = sys.modules.get("numpy")
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    module = torch.get_device_module(device) if has_streams(device) else None
    on_cpu, on_device = torch.get_rng_state(), None if module is None else module.get_rng_state(device)
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)
        torch.set_rng_state(on_cpu)
        if module is not None:
            module.set_rng_state(on_device, device)


def loss_of(model: nn.Module, loss: Callable[..., Any], sample: Sequence[Any]) -> Tensor:
    """The loss of ``sample``.

    Raises:
        ConfigurationError: it is not a scalar that backward could start from.
    """
    *inputs, target = sample
    value = loss(model(*inputs), target)
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        without = ", without a gradient" if isinstance(value, Tensor) and not value.requires_grad else ""
        raise ConfigurationError(
            f"loss returned {got}{without}: give a function of (output, target) that returns a tensor of one element "
            "that depends on the output"
        )
    return value
