"""Copies to measure on, and two measurements: the computation of a step without communication, and the link."""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from overlap._torch.device import has_streams, synchronize
from overlap._torch.optimizer import drop_hooks
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.ranks.board import Agreement
from overlap.ranks.collectives import all_reduce

__all__ = ["Computing", "Originals", "Training", "computing", "fresh", "generators_restored", "gradients_ms", "loss_of"]

_LEAST_STEPS, _MOST_STEPS = 2, 30
# All-reduces grow from here, where latency is a small part, up to the size of the gradients, until one takes long.
_LINK_BYTES, _LINK_FACTOR, _LINK_MS, _LINK_RUNS = 2**20, 4, 100.0, 3
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


def fresh(value: Any) -> Any:
    """A copy of the tensors of a sample: models may change their input in place."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, MutableMapping):
        made = copy.copy(value)
        for key, one in value.items():
            made[key] = fresh(one)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(fresh, value))
    return type(value)(map(fresh, value)) if type(value) in (list, tuple) else value


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


@dataclass(frozen=True, kw_only=True)
class Computing:
    """A step without communication; times are of the fastest step, of the slowest rank."""

    backward_ms: float
    """Of the forward, the loss and the backward."""
    update_ms: float
    gradient_bytes: int
    buffer_bytes: int
    state_bytes: int
    """Of the optimizer."""
    is_sparse: bool
    """Whether a gradient is sparse."""

    def __str__(self) -> str:
        return (
            f"forward and backward {self.backward_ms:.2f} ms, update {self.update_ms:.2f} ms, "
            f"{self.gradient_bytes / 1e6:.2f} MB of gradients"
        )


def computing(training: Training, sample: Sequence[Any], *, seconds: float, agreement: Agreement) -> Computing:
    """Train ``training``, a copy, for about ``seconds``; every rank takes the same number of steps.

    Raises:
        ConfigurationError: the ranks have different models.
    """
    device = training.device
    named = training.model.named_parameters()
    models = agreement.agree([[name, list(p.shape), str(p.dtype)] for name, p in named if p.requires_grad])
    if any(other != models[0] for other in models):
        raise ConfigurationError("ranks have different models: give the same on all")
    backward_ms: list[float] = []
    update_ms: list[float] = []

    def step() -> None:
        batch = fresh(sample)
        training.optimizer.zero_grad()
        start_s = now_s(device)
        loss_of(training.model, training.loss, batch).backward()
        middle_s = now_s(device)
        training.optimizer.step()
        backward_ms.append(1e3 * (middle_s - start_s))
        update_ms.append(1e3 * (now_s(device) - middle_s))

    for _ in range(_LEAST_STEPS):
        step()
    step_ms = max(backward_ms[-1] + update_ms[-1], 1e-3)
    for _ in range(agreement.from_rank_0(min(_MOST_STEPS, int(1e3 * seconds / step_ms)))):
        step()
    trained = [parameter for parameter in training.model.parameters() if parameter.requires_grad]
    # The first step allocates.
    own = [min(backward_ms[1:]), min(update_ms[1:]), any(p.grad is not None and p.grad.is_sparse for p in trained)]
    slowest = [max(values) for values in zip(*agreement.agree(own), strict=True)]
    return Computing(
        backward_ms=slowest[0],
        update_ms=slowest[1],
        gradient_bytes=sum(parameter.nbytes for parameter in trained),
        buffer_bytes=sum(buffer.nbytes for buffer in training.model.buffers()),
        state_bytes=sum(
            value.nbytes
            for state in training.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ),
        is_sparse=slowest[2],
    )


def gradients_ms(group: dist.ProcessGroup, nbytes: int, *, device: torch.device, agreement: Agreement) -> float:
    """How long the link is busy with ``nbytes`` of gradients: their part of the fastest of some large all-reduces."""
    size = _LINK_BYTES
    while True:
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)
        times_ms = []
        for _ in range(_LINK_RUNS):
            start_s = now_s(device)
            all_reduce(buffer, group=group)
            times_ms.append(1e3 * (now_s(device) - start_s))
        took_ms: float = max(agreement.agree(min(times_ms)))
        if size >= nbytes or took_ms > _LINK_MS:
            return took_ms * nbytes / size
        size = min(nbytes, _LINK_FACTOR * size)


def now_s(device: torch.device) -> float:
    """The time, when ``device`` has done what is queued."""
    if has_streams(device):
        synchronize(device)
    return time.perf_counter()
