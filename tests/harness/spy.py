"""Proof that the code under test ran: a parity that holds because a stage was skipped proves nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def bucket_calls(stage: type) -> Iterator[list[int]]:
    """Lists the bucket index of every call of a stage of this class in this process, until it is closed."""
    original = stage.__call__
    indices: list[int] = []

    @functools.wraps(original)
    async def recording(self: Any, bucket: Any) -> Any:
        indices.append(bucket.index)
        return await original(self, bucket)

    stage.__call__ = recording  # type: ignore[assignment]
    try:
        yield indices
    finally:
        stage.__call__ = original  # type: ignore[method-assign]
