"""The number by which summed gradients are divided."""

from __future__ import annotations

import torch.distributed as dist

from overlap.join.active import active_join

__all__ = ["gradient_divisor"]


def gradient_divisor(group: dist.ProcessGroup) -> int:
    """The number by which a sum of gradients over ``group`` is divided.

    That is the group's size, or under ``Join(..., divide_by_initial_world_size=False)`` the number of ranks that still
    have inputs. It is the same on every rank, also on those without inputs. Every reducer divides by
    ``bucket.divisor``, which is set from here alone.
    """
    join = active_join(group)
    return group.size() if join is None else join.divisor
