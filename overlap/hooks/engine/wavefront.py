"""The order in which the buckets of a backward pass advance.

[Note: one order of collectives]

Every rank must issue the collectives of a group in the same order. Otherwise they pair up wrongly: results are garbage,
or ranks wait for each other forever. DDP's buckets arrive in the same order on every rank, but *when* a collective
completes differs from rank to rank. So nothing here depends on completion. The order follows from arrivals alone:

    when a bucket arrives, it runs to its first collective;
    then each older bucket advances by one collective, in the order in which those in flight were launched;
    after the last bucket, all advance in that order, round after round, until all are done;
    a bucket that awaits the whole pass stands still until every other one is done or awaits it, too.

To advance is to wait for the collective in flight, run the stage's code up to the next one and launch it. With two
collectives per bucket (a1, a2, b1, ...) and three buckets the order is

    a1 | b1 a2 | c1 b2 (a is done) | c2

so a bucket's second collective is launched after the next bucket's first, while that one is still in flight. What was
launched first is waited for first: at the end of a pass c1 is waited for before b2, so that the code between c1 and c2
runs while b2 is in flight.
"""

from __future__ import annotations

from overlap.hooks.engine.task import Task

__all__ = ["Wavefront"]


class Wavefront:
    """The order in which the buckets of one backward pass advance. See [Note: one order of collectives]."""

    def __init__(self) -> None:
        self._active: list[Task] = []

    @property
    def active(self) -> tuple[Task, ...]:
        """What has arrived and is not done, in the order in which it advances next."""
        return tuple(self._active)

    def arrive(self, task: Task, *, is_last: bool) -> None:
        """Add the next bucket and advance the older ones; after the last one, advance all until they are done."""
        older = [other for other in self._active if not other.awaits_whole_pass]
        waiting = [other for other in self._active if other.awaits_whole_pass]
        self._active = [*waiting, task, *older]
        self._advance([task, *older])
        while is_last and self._active:
            moving = [task for task in self._active if not task.awaits_whole_pass]
            self._advance(moving or list(self._active))

    def _advance(self, tasks: list[Task]) -> None:
        for task in tasks:
            task.advance()
        self._active = [task for task in self._active if not task.is_done]
