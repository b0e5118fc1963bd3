"""Autograd's end-of-backward callbacks."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["after_backward", "after_gradients", "in_backward", "version"]


def version(tensor: torch.Tensor) -> int:
    """How often ``tensor`` has been changed in place. Private: only raising it has a public way."""
    return tensor._version


def in_backward() -> bool:
    """Whether the calling thread is inside a backward pass.

    Private because PyTorch has no public way to ask; a joined rank replays hooks outside of any backward.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def after_gradients(callback: Callable[[], None]) -> None:
    """Run ``callback`` on this thread once the current backward pass has computed its last gradient.

    Called before the last bucket's hook it runs before DDP's finalization, which then waits for buckets. Private as in
    :func:`after_backward`.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def after_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` on this thread once the current backward pass, DDP's own finalization included, is over.

    What ``callback`` raises, ``backward()`` raises. DDP queues its finalization when the hook of the last bucket
    returns, and callbacks run in the order in which they were queued. So a callback that is queued from inside the
    hook runs *before* DDP's, and an exception there would leave the reducer half finished; one that is queued from
    within that callback runs after it. Private because the engine's queue has no public name (FSDP uses it too).
    """
    engine = torch.autograd.Variable._execution_engine

    def before_ddp() -> None:
        engine.queue_callback(callback)

    engine.queue_callback(before_ddp)
