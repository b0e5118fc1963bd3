"""What kind of device tensors are on."""

from __future__ import annotations

import torch

__all__ = ["has_streams"]


def has_streams(device: torch.device) -> bool:
    """Whether work on ``device`` is queued on streams, behind which the host runs ahead; on the CPU it is not."""
    return device.type != "cpu"
