"""Measuring what a step computes: forward, when each gradient is ready, the optimizer's step. Nothing is sent."""

from __future__ import annotations

import copy
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from overlap._torch.device import has_streams, synchronize
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.plan.copies import Training
from overlap.plan.profile import ParameterTimes, Profile

__all__ = ["forward_and_loss", "fresh", "measure", "model_device", "thread_rate"]

_LEAST_STEPS, _MOST_STEPS = 3, 30
_HANDOVERS = 20


def model_device(model: nn.Module) -> torch.device:
    """Where the model's parameters are.

    Raises:
        ConfigurationError: it has none that are trained, or they are on several devices.
    """
    devices = {parameter.device for parameter in model.parameters() if parameter.requires_grad}
    if len(devices) != 1:
        raise ConfigurationError(
            f"model has trainable parameters on {len(devices)} devices: auto chooses for a model on one"
        )
    return devices.pop()


def forward_and_loss(model: nn.Module, training: Training, sample: Sequence[Any]) -> Tensor:
    """The loss of ``sample``.

    Raises:
        ConfigurationError: it is not a scalar that backward could start from.
    """
    *inputs, target = sample
    loss = training.loss(model(*inputs), target)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        without = ", without a gradient" if isinstance(loss, Tensor) and not loss.requires_grad else ""
        raise ConfigurationError(
            f"loss returned {got}{without}: give a function of (output, target) that returns a tensor of one element "
            "that depends on the output"
        )
    return loss


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


def measure(
    training: Training,
    sample: Sequence[Any],
    *,
    seconds: float,
    threads: float,
    allows_unused: bool = False,
    agreed: Callable[[int], int] = lambda steps: steps,
) -> Profile:
    """The profile of ``training``, which it trains for some steps.

    Args:
        training: a copy; hooks stay on it.
        sample: inputs and target.
        seconds: about how long it may take, but for the first steps.
        threads: of the profile; see :func:`thread_rate`.
        allows_unused: whether parameters may be without a gradient.
        agreed: makes of a number of steps the one that all ranks take: forward or loss may have collectives.
    """
    device = model_device(training.model)
    clock = _StepClock(training.model, device)
    steps: list[_Marks] = []
    start_s = time.monotonic()

    def step() -> None:
        batch = fresh(sample)
        training.optimizer.zero_grad()
        steps.append(clock.step(lambda: forward_and_loss(training.model, training, batch), training.optimizer.step))

    # The first steps make buffers and the optimizer's state.
    for _ in range(_LEAST_STEPS):
        step()
    last = steps[-1]
    step_s = (last.forward_ms + last.backward_ms + last.update_ms) / 1e3
    left_s = max(0.0, seconds - (time.monotonic() - start_s))
    for _ in range(agreed(min(_MOST_STEPS - _LEAST_STEPS, int(left_s / max(step_s, 1e-6))))):
        step()
    clock.remove()
    timed = steps[1:]
    ready = timed[-1].ready
    trained = {name: p for name, p in training.model.named_parameters() if p.requires_grad}
    unused = [name for name in trained if name not in ready]
    if unused and not allows_unused:
        raise UnsupportedError(
            f"{unused[0]!r} and {len(unused) - 1} other parameters had no gradient of the sample: give "
            'ddp_options={"find_unused_parameters": True}, or freeze them'
        )
    middle = statistics.median_low
    backward_ms = middle(one.backward_ms for one in timed)
    forward_ms = middle(one.forward_ms for one in timed)
    parameters = [
        ParameterTimes(
            name=name,
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            needed_ms=middle(one.needed.get(name, 0.0) for one in timed),
            ready_ms=min(backward_ms, middle(one.ready.get(name, backward_ms) for one in timed)),
        )
        for name, parameter in trained.items()
    ]
    return Profile(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        update_ms=middle(one.update_ms for one in timed),
        copy_ms=_copy_ms(list(trained.values()), device),
        parameters=tuple(sorted(parameters, key=lambda one: one.ready_ms)),
        buffers_bytes=sum(buffer.nbytes for buffer in training.model.buffers()),
        state_bytes=_nbytes(training.optimizer.state),
        handover_ms=_handover_ms(),
        threads=threads,
        device=device.type,
        where=f"{_device_name(device)}, torch {torch.__version__}",
    )


def thread_rate(ranks_here: int) -> float:
    """The speed of each of two threads of a rank, where so many ranks share this machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(1.0, max(0.5, cores / (2 * max(1, ranks_here))))


class _Marks:
    def __init__(self) -> None:
        self.needed: dict[str, float] = {}
        self.ready: dict[str, float] = {}
        self.forward_ms = self.backward_ms = self.update_ms = 0.0


class _StepClock:
    """Notes when modules begin their forward and when gradients come, by hooks.

    On an accelerator the times are of kernels: events are recorded, and read when the step is over.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._needed: dict[str, Any] = {}
        self._ready: dict[str, Any] = {}
        self._handles: list[Any] = []
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for module in model.modules():
            own = [names[id(p)] for p in module.parameters(recurse=False) if id(p) in names and p.requires_grad]
            if own:
                self._handles.append(module.register_forward_pre_hook(self._noting_need(own)))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._noting_ready(name)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def step(self, loss: Callable[[], Tensor], update: Callable[[], Any]) -> _Marks:
        self._needed.clear()
        self._ready.clear()
        self._settle()
        start = self._now()
        value = loss()
        forward = self._now()
        value.backward()
        backward = self._now()
        update()
        end = self._now()
        self._settle()
        marks = _Marks()
        marks.forward_ms, marks.backward_ms = self._ms(start, forward), self._ms(forward, backward)
        marks.update_ms = self._ms(backward, end)
        marks.needed = {name: self._ms(start, mark) for name, mark in self._needed.items()}
        marks.ready = {name: self._ms(forward, mark) for name, mark in self._ready.items()}
        return marks

    def _noting_need(self, names: list[str]) -> Callable[..., None]:
        def note(module: nn.Module, inputs: Any) -> None:
            mark = self._now()
            for name in names:
                self._needed.setdefault(name, mark)

        return note

    def _noting_ready(self, name: str) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            self._ready[name] = self._now()

        return note

    def _now(self) -> Any:
        if not has_streams(self._device):
            return time.perf_counter()
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event

    def _settle(self) -> None:
        if has_streams(self._device):
            synchronize(self._device)

    def _ms(self, start: Any, end: Any) -> float:
        if not has_streams(self._device):
            return float(1e3 * (end - start))
        return float(start.elapsed_time(end))


def _copy_ms(parameters: Sequence[Tensor], device: torch.device) -> float:
    """Copying as much as all gradients, once, from memory that is not in the cache to memory that is there."""
    with torch.no_grad():
        sources = [parameter.detach() for parameter in parameters]
        targets = [torch.zeros_like(source) for source in sources]
        times = []
        for _ in range(3):
            if has_streams(device):
                synchronize(device)
            start_s = time.perf_counter()
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            if has_streams(device):
                synchronize(device)
            times.append(time.perf_counter() - start_s)
    return 1e3 * min(times)


def _handover_ms() -> float:
    """From one thread to another, as between autograd's and the worker's."""
    asked, answered = threading.Event(), threading.Event()

    def answer() -> None:
        for _ in range(_HANDOVERS):
            asked.wait()
            asked.clear()
            answered.set()

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    start_s = time.perf_counter()
    for _ in range(_HANDOVERS):
        asked.set()
        answered.wait()
        answered.clear()
    thread.join()
    return 1e3 * (time.perf_counter() - start_s) / (2 * _HANDOVERS)


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(_nbytes(one) for one in value.values())
    return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else 0


def _device_name(device: torch.device) -> str:
    if has_streams(device):
        return str(torch.get_device_module(device).get_device_name(device))
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
