"""Hooks of modules."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["move_to_front"]


def move_to_front(module: nn.Module, handle: RemovableHandle) -> None:
    """Let the forward pre-hook of ``handle`` run before the module's others. Private: hooks cannot be reordered."""
    hooks: Any = module._forward_pre_hooks  # An OrderedDict, whatever the stubs say.
    if handle.id in hooks and next(iter(hooks)) != handle.id:
        hooks.move_to_end(handle.id, last=False)
