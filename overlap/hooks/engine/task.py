"""One bucket on its way through the stages."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from overlap._torch.profiling import labelled
from overlap.hooks.collectives import Operation, WholePass
from overlap.hooks.engine.executors import Executor
from overlap.hooks.engine.observer import Subject

__all__ = ["Task"]


class Task:
    """Runs the stages' coroutines for one bucket (or item of background work) from one operation to the next.

    Args:
        subject: the bucket or item.
        parts: the label and the coroutine of each stage, in order; each is taken when the one before is done.
        executor: where they run.
        on_done: called when the last one is done.
    """

    def __init__(
        self,
        subject: Subject,
        parts: Iterable[tuple[str, Coroutine[Operation, Any, None]]],
        executor: Executor,
        on_done: Callable[[], None],
    ) -> None:
        self.subject = subject
        self.is_done = False
        self._parts = iter(parts)
        self._label, self._coroutine = next(self._parts)
        self._executor = executor
        self._on_done = on_done
        # What the stage awaits; and the same from its launch until the stage gets its result.
        self._pending: Operation | None = None
        self._in_flight: Operation | None = None
        self._start_error: Exception | None = None

    @property
    def awaits_whole_pass(self) -> bool:
        """Whether it can continue only when every other task is done or awaits the same."""
        return isinstance(self._pending, WholePass)

    def start(self) -> None:
        """Run to the first operation without launching it, for stages that start on autograd's thread.

        If the stage raises, :meth:`advance` raises it: only the thread that runs the stages may end the pass.
        """
        try:
            with self._executor.scope():
                self._resume(None)
        except Exception as error:
            self._start_error = error

    def advance(self) -> None:
        """Wait for what is in flight, run to the next operation, launch it."""
        if self._start_error is not None:
            raise self._start_error
        with self._executor.scope():
            # After start(), the stage may already be done, or have an operation that is not launched yet.
            if not self.is_done and self._pending is self._in_flight:
                self._resume(self._outcome())
            if self._pending is not None:
                self._launch(self._pending)
            else:
                self._on_done()

    def close(self) -> None:
        """Abandon the coroutine: its ``finally`` blocks run.

        On a stream what it has in flight is waited for: the buffers go back to whoever owns them.
        """
        self.is_done = True
        in_flight, self._pending, self._in_flight = self._in_flight, None, None
        if in_flight is not None:
            with self._executor.scope():
                self._executor.leave(in_flight)
        self._coroutine.close()

    def _resume(self, value: Any) -> None:
        """Run to the next operation. ``value`` is what the stage gets; an exception is raised inside the stage."""
        self._in_flight = None
        try:
            operation = self._next_operation(value)
        except Exception as error:
            error.add_note(f"raised in stage {self._label}, {self.subject.describe()}")
            raise
        if operation is None:
            self._pending, self.is_done = None, True
        else:
            self._pending = operation
            if operation.is_under_way:
                self._note_launched(operation)

    def _next_operation(self, value: Any) -> Operation | None:
        """What this stage or a later one awaits next; ``None`` when the last one is done."""
        while True:
            try:
                return self._segment(value)
            except StopIteration:
                following = next(self._parts, None)
            if following is None:
                return None
            (self._label, self._coroutine), value = following, None

    def _segment(self, value: Any) -> Operation:
        if (observer := self._executor.observer) is not None:
            observer.running(self.subject, self._label)
        try:
            with labelled(f"overlap::{self._label}[bucket {self.subject.index}]"):
                if isinstance(value, Exception):
                    return self._coroutine.throw(value)
                return self._coroutine.send(value)
        finally:
            if (observer := self._executor.observer) is not None:
                observer.ran(self.subject, self._label)

    def _launch(self, operation: Operation) -> None:
        try:
            self._executor.launch(operation)
        except Exception as error:
            error.add_note(f"raised when stage {self._label} launched {operation.label}, {self.subject.describe()}")
            raise
        self._in_flight = operation
        if not operation.is_under_way:
            self._note_launched(operation)

    def _note_launched(self, operation: Operation) -> None:
        if (observer := self._executor.observer) is not None:
            observer.launched(self.subject, self._label, operation)

    def _outcome(self) -> Any:
        """Wait for the pending operation: its result, or the exception with which it failed."""
        operation = self._pending
        if operation is None:
            return None
        if (observer := self._executor.observer) is not None:
            observer.waiting(self.subject, operation)
        try:
            with labelled(f"overlap::{operation.label}[bucket {self.subject.index}]"):
                result = operation.finish(self._executor.wait)
        except Exception as error:
            return error
        if (observer := self._executor.observer) is not None:
            observer.finished(self.subject, operation)
        # What it sent, too, is the stage's alone now, which can give it back before it goes on.
        self._pending = None
        return result
