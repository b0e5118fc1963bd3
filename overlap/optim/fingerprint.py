"""A number that tells whether the values of a tensor have changed.

[Note: edits by value]

An edit of a gradient that was applied would be lost, so it is an error; but a call that leaves every value as it was,
such as ``clip_grad_norm_`` with a limit that does not bind, is not an edit. A version counter tells neither: it counts
calls, several gradients share one where ``.grad`` is a view of DDP's bucket, and ``.data`` and collectives leave it as
it is. So beside the counter the sum of a gradient's memory, taken as 64-bit integers, is noted when backward is over.

Where a counter has moved, the sum is compared. Where none has, it is compared in the first passes after registration
and in a few later ones: a loop that edits through ``.data`` does so from its first step on.

The sum wraps and does not depend on the order of its terms, so a permutation of 64-bit words is not seen. Scaling is
seen: it adds a multiple of a power of two far below 2**64 for each pair of elements. On an accelerator nothing waits
for the sum: the verdict is read at a later step.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fingerprint"]

_WORD_BYTES = 8
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """The wrapping sum of the memory of ``tensor`` as integers: an ``int64`` scalar on its device."""
    elements = _in_memory_order(tensor.detach())
    integers = elements.view(_INTEGERS[elements.element_size()])
    per_word = _WORD_BYTES // elements.element_size()
    # A view as longer integers must begin at a multiple of their length.
    start = min(-int(integers.storage_offset()) % per_word, integers.numel())
    end = start + (integers.numel() - start) // per_word * per_word
    total = integers[start:end].view(torch.int64).sum()
    if start:
        total = total + integers[:start].sum(dtype=torch.int64)
    if end < integers.numel():
        total = total + integers[end:].sum(dtype=torch.int64)
    return total


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of ``tensor``, 1-D: a view where its memory is dense in a usual layout, else a copy."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_contiguous():
        return tensor.view(-1)
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1).view(-1)
    if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return tensor.permute(0, 2, 3, 4, 1).view(-1)
    return tensor.contiguous().view(-1)
