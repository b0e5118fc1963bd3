"""Passes that communication cannot be hidden in.

[Note: nothing to hide]

A worker thread lets the stages of one bucket run while autograd computes the next. That takes a hand-over from thread
to thread for each bucket, and the interpreter's lock goes to and fro. Where a model is so small that all of it takes
less time than that, or has a single bucket, which comes when nothing is left to compute, such a pass is *late*:

- each bucket runs to its first collective on autograd's thread, which launches it there;
- when the last has come, all of them go on there, round after round, in the order of the launches.

The order of collectives still follows from arrivals alone, and is the same on every rank: whether a pass is late
depends on the sizes of the model's parameters and on the number of buckets. What was given to the worker before is
waited for first. An update may then be made once for all buckets, see :attr:`Bucket.is_late`.

The limit is that of DDP's first bucket: what is sent at once anyhow, since nothing is gained by cutting it further.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["has_nothing_to_hide", "limit_replaced"]

_limit_bytes = 2**20


@contextlib.contextmanager
def limit_replaced(limit_bytes: int) -> Iterator[None]:
    """Within it a model of at most so many bytes has nothing to hide; with 0 no pass is late."""
    global _limit_bytes
    before, _limit_bytes = _limit_bytes, limit_bytes
    try:
        yield
    finally:
        _limit_bytes = before


def has_nothing_to_hide(model_bytes: int, *, is_only_bucket: bool) -> bool:
    """Whether a pass of a model of so many bytes is late; ``is_only_bucket``: its first bucket is its last."""
    return _limit_bytes > 0 and (is_only_bucket or model_bytes <= _limit_bytes)
