"""Work on buckets outside of a backward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Operation
from overlap.hooks.task import Executor, Task

__all__ = ["ride"]

# Of two, one packs or unpacks while the other is on its way; more would only take more memory.
_IN_FLIGHT = 2


def ride(
    work: Callable[[Bucket], Coroutine[Operation, Any, None]], buckets: Sequence[Bucket], executor: Executor
) -> None:
    """Run ``work(bucket)`` for each of ``buckets`` to its end, two of them at a time.

    The order of collectives depends on the buckets' order alone: the first of each goes out behind the first of the one
    before, and before that one's others.
    """
    active: deque[Task] = deque()
    try:
        for bucket in buckets:
            task = Task(bucket, work(bucket), executor, _nothing, label="ride")
            active.append(task)
            task.advance()
            if len(active) == _IN_FLIGHT:
                _finish(active)
        while active:
            _finish(active)
    except BaseException:
        for task in active:
            task.close()
        raise


def _finish(active: deque[Task]) -> None:
    while not active[0].is_done:
        active[0].advance()
    active.popleft()


def _nothing() -> None:
    pass
