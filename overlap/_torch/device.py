"""Kinds of devices."""

from __future__ import annotations

import torch

__all__ = ["has_streams"]


def has_streams(device: torch.device) -> bool:
    """Whether work on ``device`` is queued on streams while the host runs ahead, as on accelerators but not the CPU."""
    return device.type != "cpu"
