"""Copies of what the user trains, so that measuring has no side effects on it."""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overlap._torch.device import has_streams
from overlap._torch.optimizer import drop_hooks
from overlap.errors import UnsupportedError

__all__ = ["Originals", "Training", "generators_restored"]

_REMEDY = (
    "choose on another run of the model and give this one the plan (auto(..., plan=Plan.load(path))), or register a "
    "chain by hand"
)


@dataclass(frozen=True)
class Training:
    """A model, its optimizer and its loss; all of them copies, or all the user's own."""

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[..., Any]


class Originals:
    """What the user gave. Measuring uses :meth:`copied`, and :meth:`check` says whether it left these alone."""

    def __init__(self, own: Training) -> None:
        self.own = own
        self._tensors = [*own.model.parameters(), *own.model.buffers()]
        self._versions = [tensor._version for tensor in self._tensors]
        self._gradients = [
            (parameter, parameter.grad, None if parameter.grad is None else parameter.grad._version)
            for parameter in own.model.parameters()
        ]

        inside = {id(tensor) for tensor in self._tensors}
        outside = {
            id(one): one for one in [*_of_optimizer(own.optimizer), *_of_loss(own.loss)] if id(one) not in inside
        }
        self._outside = [
            (one, one._version, one.detach().clone(), grad, None if grad is None else grad.detach().clone())
            for one, grad in ((one, one.grad if one.is_leaf else None) for one in outside.values())
        ]

    def copied(self) -> Training:
        """Copies that share no memory with the originals.

        Raises:
            UnsupportedError: something in them cannot be copied.
        """
        own = self.own
        loss: Any = own.loss
        try:
            model, optimizer, loss = copy.deepcopy(
                (own.model, own.optimizer, loss if isinstance(loss, nn.Module) else None)
            )
        except Exception as error:
            raise UnsupportedError(
                f"model or optimizer cannot be copied, and auto measures on copies ({type(error).__name__}: {error}): "
                f"{_REMEDY}"
            ) from error
        shared = {tensor.data_ptr() for tensor in self._tensors if tensor.numel()}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.numel() and tensor.data_ptr() in shared:
                raise UnsupportedError(
                    f"a copy of the model shares {name!r} with the model, so measuring would change it: {_REMEDY}"
                )
        drop_hooks(optimizer)
        # Steps stay where they are: without its scheduler and its warm-up a run may diverge at this rate.
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        return Training(model, optimizer, own.loss if loss is None else loss)

    def restore(self) -> None:
        """Put back what a loss that cannot be copied has of its own: buffers, parameters and their gradients."""
        with torch.no_grad():
            for tensor, version, value, gradient, gradient_value in self._outside:
                if tensor._version != version:
                    tensor.copy_(value)
                if tensor.is_leaf:
                    if gradient is not None and gradient_value is not None:
                        gradient.copy_(gradient_value)
                    tensor.grad = gradient

    def check(self) -> None:
        """Raises: UnsupportedError: measuring has reached the originals; their gradients are put back first."""
        touched = [
            parameter
            for parameter, gradient, version in self._gradients
            if parameter.grad is not gradient or (gradient is not None and gradient._version != version)
        ]
        for parameter, gradient, _ in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        written = [
            tensor for tensor, version in zip(self._tensors, self._versions, strict=True) if tensor._version != version
        ]
        if touched or written:
            names = {id(t): n for n, t in [*self.own.model.named_parameters(), *self.own.model.named_buffers()]}
            name = names.get(id((touched or written)[0]), "a parameter")
            what = "a gradient of" if touched else "the values of"
            raise UnsupportedError(
                f"measuring on a copy of the model has changed {what} {name!r} in the model itself: the loss or a hook "
                f"reaches the model in another way than by its argument. Give a loss of output and target alone, or "
                f"{_REMEDY}"
            )


def _of_optimizer(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _of_loss(loss: Any) -> Iterator[Tensor]:
    """The tensors of modules that ``loss`` has by ``self``, by a closure or as an argument given before."""
    waiting, seen = [loss], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            yield from one.parameters()
            yield from one.buffers()
        elif isinstance(one, Tensor):
            yield one
        elif isinstance(one, functools.partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, MethodType):
            waiting += [one.__self__, one.__func__]
        elif isinstance(one, FunctionType):
            waiting += [cell.cell_contents for cell in one.__closure__ or () if _is_filled(cell)]
            waiting += [one.__globals__[name] for name in one.__code__.co_names if name in one.__globals__]


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


@contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """Within it random numbers may be drawn; afterwards all generators are where they were before."""
    numpy: Any = sys.modules.get("numpy")
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    module = torch.get_device_module(device) if has_streams(device) else None
    on_cpu = torch.get_rng_state()
    on_device: Tensor | None = None if module is None else module.get_rng_state(device)
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)
        torch.set_rng_state(on_cpu)
        if module is not None:
            module.set_rng_state(on_device, device)
