"""Who asks an optimizer for its state.

``torch.distributed.checkpoint`` calls ``state_dict()`` and, to let an optimizer make its state, ``step()``, on every
rank, but does not say so. Only the stack does.
"""

from __future__ import annotations

import sys
from types import FrameType

__all__ = ["is_in_checkpointing", "is_in_loading"]

_CHECKPOINT = "torch.distributed.checkpoint."
_LOADER = "torch.distributed.checkpoint.state_dict_loader"


def is_in_checkpointing() -> bool:
    """Whether a function of ``torch.distributed.checkpoint`` is on this thread's stack."""
    return _is_on_stack(_CHECKPOINT)


def is_in_loading() -> bool:
    """Whether ``torch.distributed.checkpoint.load`` is on this thread's stack."""
    return _is_on_stack(_LOADER)


def _is_on_stack(prefix: str) -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(prefix):
            return True
        frame = frame.f_back
    return False
