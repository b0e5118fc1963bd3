"""Kinds of devices."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["current_stream", "has_streams", "hold"]


def has_streams(device: torch.device) -> bool:
    """Whether work on ``device`` is queued on streams while the host runs ahead, as on accelerators but not the CPU."""
    return device.type != "cpu"


def current_stream(device: torch.device) -> torch.Stream | None:
    """The current stream of ``device``; ``None`` where there are none."""
    if device.type in ("cpu", "meta"):
        return None
    stream: torch.Stream = torch.get_device_module(device).current_stream(device)
    return stream


def hold(tensor: Tensor) -> Tensor:
    """Keep the memory of ``tensor`` from being reused before the current stream has done with it.

    For tensors that one bucket's stream has made and another's uses, as happens after DDP cuts its buckets anew.
    """
    if (stream := current_stream(tensor.device)) is not None:
        tensor.record_stream(stream)
    return tensor
