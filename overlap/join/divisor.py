"""The number by which summed gradients are divided."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["gradient_divisor"]


def gradient_divisor(group: dist.ProcessGroup) -> int:
    """The number by which a sum of gradients over ``group`` is divided: the group's size.

    Every reducer divides by ``bucket.divisor``, and that comes from here alone.
    """
    return group.size()
