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

import operator
from collections.abc import Callable, Coroutine, Sequence
from itertools import filterfalse
from typing import Any, NamedTuple

from overlap._torch.profiling import LabelType
from overlap.hooks.collectives import Operation, WholePass
from overlap.hooks.engine.executors import Executor

__all__ = ["Part", "Task", "Wavefront"]

_awaits_whole_pass = operator.attrgetter("awaits_whole_pass")
_is_done = operator.attrgetter("is_done")


class Wavefront:
    """The order in which the buckets of one backward pass advance. See [Note: one order of collectives]."""

    def __init__(self) -> None:
        self._active: list[Task] = []

    @property
    def active(self) -> list[Task]:
        """The tasks that have arrived and are not done, in the order in which they advance next."""
        return list(self._active)

    def arrive(self, task: Task, *, is_last: bool) -> None:
        """Add the next bucket and advance the older ones; after the last one, advance all until they are done."""
        moving = [task, *filterfalse(_awaits_whole_pass, self._active)]
        self._active = [*filter(_awaits_whole_pass, self._active), *moving]
        while moving:
            for each in moving:
                each.advance()
            self._active = list(filterfalse(_is_done, self._active))
            moving = list(filterfalse(_awaits_whole_pass, self._active)) or self.active if is_last else []


class Part(NamedTuple):
    """One stage of a chain, as a task runs it."""

    label: str
    run: Callable[[Any], Coroutine[Operation, Any, None]]
    passed: Callable[[Any], Any] = lambda given: given
    """The bucket as the next stage gets it."""


class Task:
    """Runs the stages' coroutines for one subject from one operation to the next.

    Args:
        subject: the bucket or item.
        given: the same, as the first stage gets it.
        parts: the stages, in order.
        executor: where they run.
        labelled: puts the code in profiles.
        on_done: called with the subject when the last one is done.
    """

    def __init__(
        self,
        subject: Any,
        given: Any,
        parts: Sequence[Part],
        executor: Executor,
        *,
        labelled: LabelType,
        on_done: Callable[[Any], None] = lambda subject: None,
    ) -> None:
        self.subject = subject
        self.is_done = False
        self.awaits_whole_pass = False
        """Whether it can continue only when every other task is done or awaits the same."""
        self._given = given
        self._parts = parts
        self._place = 0
        self._coroutine: Coroutine[Operation, Any, None] | None = None
        self._executor = executor
        self._labelled = labelled
        self._on_done = on_done
        # What the stage awaits; and the same from its launch until the stage gets its result.
        self._awaited: Operation | None = None
        self._in_flight: Operation | None = None
        self._is_ahead = False
        self._start_error: Exception | None = None

    def start(self) -> None:
        """Run to the first operation without launching it, for stages that start on autograd's thread.

        If the stage raises, :meth:`advance` raises it: only the thread that runs the stages may end the pass.
        """
        self._is_ahead = True
        try:
            with self._executor.scope():
                self._resume()
        except Exception as error:
            self._start_error = error

    def advance(self) -> None:
        """Wait for what is in flight, run to the next operation, launch it; called in the executor's scope."""
        if self._start_error is not None:
            raise self._start_error
        if self._is_ahead:
            self._is_ahead = False
        else:
            self._resume()
        operation = self._awaited
        if operation is None:
            self.is_done = True
            self._on_done(self.subject)
            return
        self.awaits_whole_pass = isinstance(operation, WholePass)
        try:
            self._executor.launch(operation)
        except Exception as error:
            label = self._parts[self._place].label
            error.add_note(f"raised when stage {label} launched {operation.label}, {self.subject.describe()}")
            raise
        self._in_flight = operation
        if self._executor.observer is not None and not operation.is_under_way:
            self._note_launched(operation)

    def close(self) -> None:
        """Abandon the coroutine: its ``finally`` blocks run.

        On a stream what it has in flight is waited for: the buffers go back to whoever owns them.
        """
        self.is_done = True
        in_flight, self._awaited, self._in_flight = self._in_flight, None, None
        if in_flight is not None:
            with self._executor.scope():
                self._executor.leave(in_flight)
        if self._coroutine is not None:
            self._coroutine.close()

    def _resume(self) -> None:
        """Wait for what is in flight, and run this stage or a later one to its next operation."""
        subject, observer, labelled = self.subject, self._executor.observer, self._labelled
        result: Any = None
        raised: Exception | None = None
        if (operation := self._in_flight) is not None:
            if observer is not None:
                observer.waiting(subject, operation)
            try:
                with labelled(f"overlap::{operation.label}[bucket {subject.index}]"):
                    result = operation.finish(self._executor.wait)
            except Exception as error:
                raised = error  # The stage's own code may handle it.
            else:
                if observer is not None:
                    observer.finished(subject, operation)
            # What it sent, too, is the stage's alone now, which can give it back before it goes on.
            self._awaited = self._in_flight = operation = None
        while self._place < len(self._parts):
            part = self._parts[self._place]
            if observer is not None:
                observer.running(subject, part.label)
            try:
                with labelled(f"overlap::{part.label}[bucket {subject.index}]"):
                    if self._coroutine is None:
                        self._coroutine = part.run(self._given)
                    if raised is not None:
                        self._awaited = self._coroutine.throw(raised)
                    else:
                        self._awaited = self._coroutine.send(result)
            except StopIteration:
                self._coroutine = result = None
                self._place += 1
                # The last stage done, nothing here refers to the gradients any more.
                self._given = part.passed(self._given) if self._place < len(self._parts) else None
                continue
            except Exception as error:
                error.add_note(f"raised in stage {part.label}, {subject.describe()}")
                raise
            finally:
                raised = None  # It has this frame, which would keep it.
                if observer is not None:
                    observer.ran(subject, part.label)
            if observer is not None and self._awaited.is_under_way:
                self._note_launched(self._awaited)
            return

    def _note_launched(self, operation: Operation) -> None:
        if (observer := self._executor.observer) is not None:
            observer.launched(self.subject, self._parts[self._place].label, operation)
