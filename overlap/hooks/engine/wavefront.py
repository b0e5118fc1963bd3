"""The buckets of a backward pass: the order in which they advance, and the end of a pass that fails.

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
import threading
from collections.abc import Callable, Coroutine, Sequence
from itertools import filterfalse
from typing import Any, NamedTuple

import torch

from overlap._torch.autograd import LabelType, label_type
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Operation, WholePass
from overlap.hooks.engine.executors import BucketFuture, Executor

__all__ = ["AbandonedBackwardError", "BackwardPass", "StageRun", "Task", "Wavefront"]

_awaits_whole_pass = operator.attrgetter("awaits_whole_pass")
_is_done = operator.attrgetter("is_done")
_ABANDONED = "backward ended with an error outside of the stages, which that rank has raised"


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


class StageRun(NamedTuple):
    """One stage of a chain, as a task runs it."""

    label: str
    run: Callable[[Any], Coroutine[Operation, Any, None]]
    passed: Callable[[Any], Any] | None = None
    """Gives the bucket as the next stage gets it; the same bucket where ``None``."""


class Task:
    """Runs the stages' coroutines for one subject, a bucket or an item, from one operation to the next.

    ``given`` is the subject as the first stage gets it; ``labelled`` puts the code in profiles; ``on_done`` is called
    with the subject when the last stage is done.
    """

    def __init__(
        self,
        subject: Any,
        given: Any,
        runs: Sequence[StageRun],
        executor: Executor,
        *,
        labelled: LabelType,
        on_done: Callable[[Any], None] | None = None,
    ) -> None:
        self.subject = subject
        self.is_done = False
        self.awaits_whole_pass = False
        """Whether it can continue only when every other task is done or awaits the same."""
        self._given = given
        self._runs = runs
        self._position = 0
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
        try:
            self.advance(launches=False)
        except Exception as error:
            self._start_error = error
        self._is_ahead = True

    def advance(self, *, launches: bool = True) -> None:
        """Wait for what is in flight, run to the next operation, launch it; called in the executor's scope."""
        subject, observer, labelled = self.subject, self._executor.observer, self._labelled
        result: Any = None
        raised: Exception | None = None
        if self._start_error is not None:
            raise self._start_error
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
            # What it sent, too, is the stage's alone now, which can give it back before it continues.
            self._awaited = self._in_flight = operation = None
        while self._position < len(self._runs) and not self._is_ahead:
            stage = self._runs[self._position]
            if observer is not None:
                observer.running(subject, stage.label)
            try:
                with labelled(f"overlap::{stage.label}[bucket {subject.index}]"):
                    if self._coroutine is None:
                        self._coroutine = stage.run(self._given)
                    if raised is not None:
                        self._awaited = self._coroutine.throw(raised)
                    else:
                        self._awaited = self._coroutine.send(result)
                break
            except StopIteration:
                self._coroutine = result = None
                self._position += 1
                if self._position == len(self._runs):
                    self._given = None  # Nothing here refers to the gradients any more.
                elif stage.passed is not None:
                    self._given = stage.passed(self._given)
            except Exception as error:
                error.add_note(f"raised in stage {stage.label}, {subject.describe()}")
                raise
            finally:
                raised = None  # It has this frame, which would keep it.
                if observer is not None:
                    observer.ran(subject, stage.label)
        self._is_ahead = False
        if not launches:
            return
        if (operation := self._awaited) is None:
            self.is_done = True
            if self._on_done is not None:
                self._on_done(subject)
            return
        self.awaits_whole_pass = isinstance(operation, WholePass)
        label = self._runs[self._position].label
        try:
            self._executor.launch(operation)
        except Exception as error:
            error.add_note(f"raised when stage {label} launched {operation.label}, {subject.describe()}")
            raise
        self._in_flight = operation
        if observer is not None:
            observer.launched(subject, label, operation)

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


class AbandonedBackwardError(RuntimeError):
    """Stands for an error of the model's own in backward, where only autograd knows it."""

    def __init__(self) -> None:
        super().__init__(_ABANDONED)

    @staticmethod
    def caused(error: BaseException) -> bool:
        """Whether ``error`` is one, on this rank or on another, so that DDP has a backward that it cannot finish."""
        return _ABANDONED in str(error)


class BackwardPass:
    """Runs the stages on the buckets of one backward pass, which is number ``step``.

    The futures always complete with the buckets' buffers: if a hook raised, or a future failed, DDP's reducer would
    stay half finished and the model unusable. Instead the first error is kept in ``error``, to be raised when backward
    is over.
    """

    def __init__(
        self,
        step: int,
        runs: Sequence[StageRun],
        executor: Executor,
        *,
        divisor: int,
        watchers: Sequence[Any] = (),
    ) -> None:
        self.step = step
        self.divisor = divisor
        """Of all buckets: who takes part does not change within a pass."""
        self.error: BaseException | None = None
        self.executor = executor
        self._runs = runs
        self._labelled = label_type()
        self._watchers = watchers
        self._wavefront = Wavefront()
        self._unfinished: dict[int, tuple[BucketFuture, torch.Tensor]] = {}
        # The worker may fail the pass while the training thread adds buckets to it.
        self._lock = threading.Lock()

    def admit(self, bucket: Bucket, future: BucketFuture) -> Task | None:
        """Accept a bucket, on the training thread; ``None`` if the pass has failed and nothing more is to run."""
        given = bucket
        for watcher in self._watchers:
            given = watcher.arrived(given)
        with self._lock:
            if self.error is not None:
                future.set_result(bucket.buffer)
                return None
            self._unfinished[bucket.index] = (future, bucket.buffer)
        return Task(bucket, given, self._runs, self.executor, labelled=self._labelled, on_done=self._complete)

    def drive(self, task: Task, is_last: bool, refusal: Exception | None = None) -> None:
        """Add a bucket to the wavefront, on the thread that runs the stages; with a ``refusal`` the pass fails."""
        if self.error is not None:
            task.close()
            return
        try:
            # After a failure the ranks connect again in every pass, so that a second failure is reported too.
            if not self.executor.channels.is_open:
                self.executor.channels.open()
            if refusal is not None:
                raise refusal
            with self.executor.scope():
                self._wavefront.arrive(task, is_last=is_last)
        except BaseException as error:
            task.close()
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the pass: keep the first error, close what runs, return every bucket to DDP as it is; on the thread that
        runs the stages, or before the first bucket."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            unfinished, self._unfinished = self._unfinished, {}
        for task in self._wavefront.active:
            task.close()
        self.executor.join()
        self.executor.channels.fail(error)
        for future, buffer in unfinished.values():
            future.set_result(buffer)

    def wait(self) -> None:
        """Block until every accepted bucket is done; on an accelerator the current stream waits, not the host."""
        with self._lock:
            futures = [future for future, _ in self._unfinished.values()]
        for future in futures:
            future.wait()
        self.executor.join()  # Behind those, too, that were done before; in a backward, DDP waits for all.

    def _complete(self, bucket: Bucket) -> None:
        with self._lock:
            future = self._unfinished.pop(bucket.index)[0]
        try:
            if self._watchers:
                self.executor.channels.forget_done()
            for watcher in self._watchers:
                watcher.through(bucket)
        finally:
            future.set_result(bucket.buffer)
