"""Where the parts of a flat buffer begin that are sent each on its own.

[Note: segments]

NCCL copies 16 bytes at a time where every address it is given is a multiple of 16, and else an element at a time. So
where a device has streams, each rank's part of a buffer has the room of a multiple of 16 elements, which is a multiple
of 16 bytes in any dtype, and tensors that begin elsewhere are copied before they are sent. On a CPU nothing is padded
or copied. State is kept by parameter name, so the length of segments never reaches a checkpoint.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from overlap._torch.device import has_streams

ALIGNMENT = 16


def round_up(number: int, multiple: int = ALIGNMENT) -> int:
    """The smallest multiple that is not less.

    >>> round_up(17), round_up(32), round_up(0)
    (32, 32, 0)
    """
    return math.ceil(number / multiple) * multiple


def segment_multiple(device: torch.device) -> int:
    """Lengths of segments on ``device`` are multiples of this, in elements."""
    return ALIGNMENT if has_streams(device) else 1


def can_be_sent(flat: Tensor) -> bool:
    """Whether ``flat`` begins where a collective takes it at full speed."""
    return not has_streams(flat.device) or flat.data_ptr() % ALIGNMENT == 0
