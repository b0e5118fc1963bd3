"""Memory that one bucket's stream makes and another's uses, where buckets are cut anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["current_stream", "hold"]


def current_stream(device: torch.device) -> Any:
    """The stream that work is queued on now; ``None`` where there are no streams."""
    if device.type in ("cpu", "meta"):
        return None
    return torch.get_device_module(device).current_stream(device)


def hold(tensor: Tensor) -> Tensor:
    """Keep the memory of ``tensor`` from being given out anew before the current stream has done with it."""
    if (stream := current_stream(tensor.device)) is not None:
        tensor.record_stream(stream)
    return tensor
