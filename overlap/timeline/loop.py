"""The hooks by which a training loop tells a recorder where it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from overlap._torch.optimizer import only_watches
from overlap.timeline.recording import Recorder

__all__ = ["watching"]


@contextmanager
def watching(ddp: DistributedDataParallel, recorder: Recorder) -> Iterator[None]:
    """Tell ``recorder`` of every forward and backward of ``ddp`` and of every optimizer's step."""

    def before_forward(module: Any, inputs: Any) -> None:
        recorder.before_forward(is_training=torch.is_grad_enabled(), syncs_buffers=bool(ddp.will_sync_module_buffers()))

    def before_module(module: Any, inputs: Any) -> None:
        recorder.before_module()

    def after_forward(module: Any, inputs: Any, output: Any) -> None:
        recorder.after_forward()
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(on_output_gradient)

    def on_output_gradient(gradient: Tensor) -> None:
        recorder.on_output_gradient()

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.before_optimizer()

    @only_watches
    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.after_optimizer()

    with ExitStack() as handles:
        # First of all hooks: what a registered stage does before a forward belongs to that step.
        handles.enter_context(ddp.register_forward_pre_hook(_eager(before_forward), prepend=True))
        handles.enter_context(ddp.module.register_forward_pre_hook(_eager(before_module)))
        handles.enter_context(ddp.register_forward_hook(_eager(after_forward)))
        handles.enter_context(register_optimizer_step_pre_hook(before_step))
        handles.enter_context(register_optimizer_step_post_hook(after_step))
        yield


def _eager(hook: Callable[..., None]) -> Any:
    """``hook``, which is not part of a compiled forward."""
    return torch.compiler.disable(hook)


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in what a forward returned."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
    elif is_dataclass(output):
        for entry in fields(output):
            yield from _tensors(getattr(output, entry.name))
