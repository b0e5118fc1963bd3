"""One bucket's way through the stages, and what drives it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch.distributed as dist
from torch.autograd.profiler import record_function

from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Channels, Operation, WholePass

__all__ = ["Executor", "Observer", "Subject", "Task"]


class Subject(Protocol):
    """What a task works on: a bucket of a backward pass, or an item of background work."""

    @property
    def index(self) -> int: ...

    @property
    def step(self) -> int: ...

    def describe(self) -> str: ...


class Observer(Protocol):
    """Is told what happens in a pass, as it happens: on the thread and, on accelerators, with the stream current where
    it happens. ``label`` is the stage's ``repr``."""

    def arrived(self, bucket: Bucket) -> None:
        """DDP handed a bucket over: all its gradients are there."""
        ...

    def running(self, subject: Subject, label: str) -> None:
        """Code of a stage is about to run, up to its next operation."""
        ...

    def ran(self, subject: Subject, label: str) -> None:
        """It has run."""
        ...

    def launched(self, subject: Subject, label: str, operation: Operation) -> None:
        """A stage's operation was started, or was found to be under way."""
        ...

    def waiting(self, subject: Subject, operation: Operation) -> None:
        """An operation is about to be waited for."""
        ...

    def finished(self, subject: Subject, operation: Operation) -> None:
        """It has been waited for, and did not fail."""
        ...


class Executor(Protocol):
    """Where code runs and what it means to wait."""

    @property
    def channels(self) -> Channels: ...

    @property
    def observer(self) -> Observer | None: ...

    def scope(self, lane: int) -> AbstractContextManager[Any]:
        """The context (stream) for the code of a task in ``lane``."""
        ...

    def wait(self, work: dist.Work) -> None:
        """Make what follows in the scope wait for ``work``."""
        ...

    def wait_for_pass(self) -> None:
        """Make what follows in the scope wait for what ran in every other scope so far."""
        ...


class Task:
    """The coroutines that a bucket (or an item of background work) goes through, and what it waits for.

    Args:
        subject: what they work on.
        parts: each stage's label and its coroutine, in their order; taken when the one before is through.
        executor: where they run.
        on_done: called when the last one is through.
        lane: tasks of different lanes may run side by side on an accelerator, those of one lane one after another.
    """

    def __init__(
        self,
        subject: Subject,
        parts: Iterable[tuple[str, Coroutine[Operation, Any, None]]],
        executor: Executor,
        on_done: Callable[[], None],
        *,
        lane: int,
    ) -> None:
        self.subject = subject
        self.is_done = False
        self._parts = iter(parts)
        self._lane = lane
        self._label, self._coroutine = next(self._parts)
        self._executor = executor
        self._on_done = on_done
        self._pending: Operation | None = None
        self._is_launched = False
        self._start_error: Exception | None = None

    @property
    def awaits_whole_pass(self) -> bool:
        return isinstance(self._pending, WholePass)

    def start(self) -> None:
        """Run to the first operation without launching it, for stages that start on autograd's thread.

        What the stage raises is kept for :meth:`advance`: only the thread that drives the pass may end it.
        """
        try:
            with self._executor.scope(self._lane):
                self._resume(None)
        except Exception as error:
            self._start_error = error

    def advance(self) -> None:
        """Wait for what is in flight, run to the next operation, launch it."""
        if self._start_error is not None:
            raise self._start_error
        with self._executor.scope(self._lane):
            # A stage that started on autograd's thread may have an operation that is yet to be launched, or be through.
            if not self.is_done and (self._pending is None or self._is_launched):
                self._resume(self._outcome())
            if self._pending is not None:
                self._launch(self._pending)
            else:
                self._on_done()

    def close(self) -> None:
        """Abandon the coroutine; its ``finally`` blocks run."""
        self.is_done = True
        self._pending = None
        self._coroutine.close()

    def _resume(self, value: Any) -> None:
        """Run to the next operation; an exception as ``value`` is raised inside the stage."""
        self._is_launched = False
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
        """What this stage or one after it awaits next; ``None`` when the last is through."""
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
            with record_function(f"overlap::{self._label}[bucket {self.subject.index}]"):
                if isinstance(value, Exception):
                    return self._coroutine.throw(value)
                return self._coroutine.send(value)
        finally:
            if (observer := self._executor.observer) is not None:
                observer.ran(self.subject, self._label)

    def _launch(self, operation: Operation) -> None:
        try:
            operation.launch(self._executor.channels)
        except Exception as error:
            error.add_note(f"raised when stage {self._label} launched {operation.label}, {self.subject.describe()}")
            raise
        self._is_launched = True
        if not operation.is_under_way:
            self._note_launched(operation)

    def _note_launched(self, operation: Operation) -> None:
        if (observer := self._executor.observer) is not None:
            observer.launched(self.subject, self._label, operation)

    def _outcome(self) -> Any:
        """Wait for what is in flight: its result, or the exception with which it failed."""
        operation = self._pending
        if operation is None:
            return None
        if (observer := self._executor.observer) is not None:
            observer.waiting(self.subject, operation)
        try:
            with record_function(f"overlap::{operation.label}[bucket {self.subject.index}]"):
                if isinstance(operation, WholePass):
                    self._executor.wait_for_pass()
                result = operation.finish(self._executor.wait)
        except Exception as error:
            return error
        if (observer := self._executor.observer) is not None:
            observer.finished(self.subject, operation)
        return result
