"""Cuts what is exchanged of a bucket into parts: a gather, for a forward that runs meanwhile; a reduction, for memory.

[Note: parts of a gather]

A bucket is as large as an efficient reduction needs, 25 MB by default: a fifth of a second on a link of 1
Gbit/s. A forward that waited for its first layer until the whole bucket is there would leave the processor
idle, and one that waited for its last layer so would leave the link idle, since the first gradient comes after that. So
the gather of a bucket is cut between parameters, and a layer waits for little more than its own. DDP puts gradients
into buckets in the order in which they come, so the forward needs a bucket's last parameters first.

A part has so many bytes that the cost of each message, tens of microseconds, is negligible. A parameter is
never cut: no layer could begin with half of it. Parameters that one rank owns alone (`partition="parameter"`) are not
parted either, since one rank would send each part and the links of the others rest; nor what travels through a wire,
whose blocks cross parameters, so that in other parts it would be rounded otherwise.

Which parts a bucket has depends on the sizes of its parameters alone, so it is the same on every rank.

[Note: what is reduced at once]

A collective needs a packed copy of what it reduces. DDP's first pass has one bucket of the whole model, and that copy
would be the largest of the whole run. So a pass of a single large bucket is reduced in parts, one after another; each
has at least about the size of DDP's usual buckets, which loses nothing. Each sum has the same summands in the same
order. Where other buckets follow, a part would wait for the next of them to come, and the link would rest; those are
reduced whole. On Gloo messages are added row by row instead: see [Note: rows of a sum] in
:mod:`overlap._torch.gloo`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from overlap._torch.device import has_streams

__all__ = ["bytes_at_once", "least_part_bytes", "parts_by_need"]

_LEAST_BYTES = 2**20
# Networks of accelerators are a hundred times as fast, and a launch of theirs takes as long as a message of a CPU.
_LEAST_BYTES_ON_STREAMS = 2**24

# Of DDP's buckets, unless it is told otherwise; on accelerators they are often given more.
_AT_ONCE_BYTES = 25 * 2**20
_AT_ONCE_BYTES_ON_STREAMS = 2**28


def least_part_bytes(device: torch.device) -> int:
    """How many bytes of parameters a part on ``device`` has at least."""
    return _LEAST_BYTES_ON_STREAMS if has_streams(device) else _LEAST_BYTES


def bytes_at_once(device: torch.device) -> int:
    """How many bytes of parameters are reduced at once at least. See [Note: what is reduced at once]."""
    return _AT_ONCE_BYTES_ON_STREAMS if has_streams(device) else _AT_ONCE_BYTES


def parts_by_need(sizes_bytes: Sequence[int], least_bytes: int) -> list[slice]:
    """The parts of a bucket whose parameters have these sizes, the last parameters first.

    Each is as small as it can be and has at least ``least_bytes``, unless the whole bucket has less.

    >>> parts_by_need([10, 1, 1, 30, 2, 2], least_bytes=4)
    [slice(4, 6, None), slice(3, 4, None), slice(0, 3, None)]
    """
    parts: list[slice] = []
    end = len(sizes_bytes)
    gathered_bytes = 0
    for place in reversed(range(len(sizes_bytes))):
        gathered_bytes += sizes_bytes[place]
        if gathered_bytes >= least_bytes:
            parts.append(slice(place, end))
            end, gathered_bytes = place, 0
    if end:
        last = parts.pop() if parts else slice(0, end)
        parts.append(slice(0, last.stop))
    return parts
