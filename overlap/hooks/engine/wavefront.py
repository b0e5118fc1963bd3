"""The buckets of a backward pass: the order in which they advance, and the end of a pass that fails.

Work between passes, such as averaging or gathering parameters, runs in the same order: see :func:`run_items`.

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

import copy
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from overlap._torch.device import current_stream, has_streams, recorded_event
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Operation
from overlap.hooks.engine.executors import BucketFuture, Executor
from overlap.hooks.stage import InnerCode

BETWEEN_PASSES = "background"
"""The label of work between passes, where a bucket has that of a stage."""


class Wavefront:
    """The order in which the buckets of one backward pass advance. See [Note: one order of collectives].

    ``on_done`` is called with the subject of each task when its last piece is done.
    """

    def __init__(self, on_done: Callable[[Any], None] | None = None) -> None:
        self._on_done = on_done
        self._moving: list[Task] = []
        self._standing: list[Task] = []

    def arrive(self, task: Task, *, is_last: bool) -> None:
        """Add the next bucket and advance the older ones; after the last one, advance all until they are done."""
        moving = self._moving = [task, *self._moving]
        while moving:
            left: list[Task] = []
            for each in moving:
                if (awaited := each.advance()) is None:
                    if self._on_done is not None:
                        self._on_done(each.subject)
                elif awaited.awaits_whole_pass:
                    self._standing.append(each)
                else:
                    left.append(each)
            if is_last and not left:
                left, self._standing = self._standing, []
            moving, self._moving = left if is_last else [], left

    def close(self) -> None:
        """Abandon all tasks that are not done."""
        for task in [*self._standing, *self._moving]:
            task.close()


class Piece(NamedTuple):
    """Code that a task runs: of one stage, up to its next operation or its end."""

    label: str
    """Of the stage, in profiles and errors."""
    code: Callable[..., Any]
    """A piece of a plan: called, it returns the operation to launch. Or a whole stage: it returns a coroutine."""
    is_planned: bool = False
    output_bucket: Callable[[Any], Any] | None = None
    """Gives the bucket as the next stage gets it, when this stage is done; the same bucket where ``None``."""


class Task:
    """Runs the pieces of one subject, a bucket or work between passes, from one operation to the next.

    [Note: plans]

    A stage is a coroutine, or where :meth:`Stage.plan` offers one, a *plan*: the functions between its operations.
    Plans are made once for each of DDP's buckets and kept with what they use, so that a bucket costs the host little
    more than its kernels. A task runs both, so one wavefront orders them. It is made for one pass, or kept and run
    again in each pass that is plain (see ``BackwardPass.is_plain``) while DDP's bucket is what it was (see
    ``runtime._KeptBucket``).

    Args:
        subject: which is worked on; a task that is kept is given another one by an assignment between two passes.
        given: the subject as the first stage gets it, if it is a coroutine.
    """

    def __init__(self, pieces: Sequence[Piece], executor: Executor, subject: Subject, given: Subject) -> None:
        self.subject = subject
        self.given: Subject | None = given
        self._pieces, self._count = pieces, len(pieces)
        self._position = 0
        self._executor = executor
        self._coroutine: Coroutine[Operation, Any, None] | None = None
        # The operation in flight, and the piece that launched it.
        self._in_flight: Operation | None = None
        self._launched: Piece | None = None

    def advance(self) -> Operation | None:
        """Wait for the operation in flight, run to the next one, launch it and return it; ``None``: all is done.

        Called in a job of the executor's when a later bucket arrives, or after the last one: so code behind an
        operation, such as an update behind the reduction, runs then, and not when the operation completes. See [Note:
        one order of collectives].
        """
        executor, subject, pieces = self._executor, self.subject, self._pieces
        observer, labels = executor.observer, executor.labels
        result: Any = None
        raised: Exception | None = None
        if (operation := self._in_flight) is not None:
            if observer is not None:
                observer.waiting(subject, operation)
            try:
                with labels[operation.label, subject.index]:
                    result = operation.finish(executor.wait)
            except Exception as error:
                if self._launched is not None and self._launched.is_planned:
                    self._note_stage(error, self._launched)
                    raise
                raised = error  # The stage's own code may handle it.
            else:
                if observer is not None:
                    observer.finished(subject, operation)
            # What it sent, too, is the stage's alone now, which can give it back before it continues.
            self._in_flight = self._launched = operation = None
        while self._position < self._count:
            piece = pieces[self._position]
            label, code, is_planned, output_bucket = piece
            if observer is not None:
                observer.running(subject, label)
            try:
                with labels[label, subject.index]:
                    awaited = code() if is_planned else self._resume(code, result, raised)
            except Exception as error:
                self._note_stage(error, piece)
                raise
            finally:
                raised = None  # It has this frame, which would keep it.
                if observer is not None:
                    observer.ran(subject, label)
            if is_planned or awaited is None:
                result = None
                self._position += 1
                if output_bucket is not None:
                    self.given = output_bucket(self.given)
            if awaited is not None:
                try:
                    executor.launch(awaited)
                except Exception as error:
                    self._note(error, f"raised when stage {label} launched {awaited.label}")
                    raise
                self._in_flight, self._launched = awaited, piece
                if observer is not None:
                    observer.launched(subject, label, awaited)
                return awaited
        self._position = 0
        self.given = None  # Nothing here refers to the gradients any more.
        return None

    def _resume(self, stage: Callable[[Any], Any], result: Any, raised: Exception | None) -> Operation | None:
        """Run the stage's coroutine to its next operation; ``None``: it is done."""
        if self._coroutine is None:
            self._coroutine = stage(self.given)
        try:
            return self._coroutine.send(result) if raised is None else self._coroutine.throw(raised)
        except StopIteration:
            self._coroutine = None
            return None

    def _note_stage(self, error: Exception, piece: Piece) -> None:
        if isinstance(piece.code, InnerCode):
            error.add_note(piece.code.where())
        self._note(error, f"raised in stage {piece.label}")

    def _note(self, error: Exception, where: str) -> None:
        error.add_note(f"{where}, {self.subject.describe()}")

    def close(self) -> None:
        """Abandon what runs: the ``finally`` blocks of a coroutine run. It cannot run again.

        On a stream what it has in flight is waited for: the buffers go back to whoever owns them.
        """
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            self._executor.abandon(in_flight)
        if self._coroutine is not None:
            self._coroutine.close()


class BackwardPass:
    """Runs the stages on the buckets of one backward pass, which is number ``step``.

    The futures always complete with the buckets' buffers: if a hook raised, or a future failed, DDP's reducer would
    stay half finished and the model unusable. Instead the first error is kept in ``error``, to be raised when backward
    is over.
    """

    def __init__(
        self, step: int, executor: Executor, *, divisor: int, is_plain: bool = False, watchers: Sequence[Any] = ()
    ) -> None:
        self.step = step
        self.divisor = divisor
        """The same for all buckets: the ranks that take part do not change within a pass."""
        self.is_plain = is_plain
        """Whether kept tasks may run: decided once, when the pass begins. See [Note: plans]."""
        self.error: BaseException | None = None
        self.executor = executor
        executor.refresh_labels()
        self.joins_once = is_plain and executor.worker is None
        """Whether DDP waits once for the stages of all buckets, and for the future of none: each has a kept task, or is
        refused, which ends the pass."""
        self._watchers = watchers
        self._wavefront = Wavefront(None if self.joins_once else self.complete)
        self._unfinished: dict[int, tuple[BucketFuture, torch.Tensor]] = {}
        # The worker may fail the pass while the training thread adds buckets to it.
        self._lock = threading.Lock()

    def lent(self, bucket: Bucket) -> Bucket:
        """``bucket`` as the first stage gets it, on the training thread."""
        for watcher in self._watchers:
            bucket = watcher.arrived(bucket)
        return bucket

    def expect(self, bucket: Bucket) -> BucketFuture:
        """A future that :meth:`complete` completes, on the training thread; at once if the pass has failed."""
        future = self.executor.new_future()
        with self._lock:
            if self.error is None:
                self._unfinished[bucket.index] = (future, bucket.buffer)
                return future
        future.set_result(bucket.buffer)
        return future

    def drive(self, task: Task, *, is_last: bool) -> None:
        """Add the task of a bucket to the wavefront, on the thread that runs the stages; after the last one, run all to
        their end."""
        if self.error is not None:
            return
        try:
            # After a failure the ranks connect again in every pass, so that a second failure is reported too.
            if not self.executor.channels.is_open:
                self.executor.channels.open()
            self._wavefront.arrive(task, is_last=is_last)
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the pass: keep the first error, close what runs, return every bucket to DDP as it is; on the thread that
        runs the stages, or before the first bucket."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            unfinished, self._unfinished = self._unfinished, {}
        self._wavefront.close()
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

    def complete(self, bucket: Bucket) -> None:
        """The last stage of a bucket is done."""
        with self._lock:
            future, _ = self._unfinished.pop(bucket.index, (None, None))
        if future is None:
            return  # Of FSDP, which waits for the stream.
        try:
            if self._watchers:
                self.executor.channels.forget_done()
            for watcher in self._watchers:
                watcher.through(bucket)
        finally:
            future.set_result(bucket.buffer)


# Between passes.


@dataclass(frozen=True, eq=False, kw_only=True)
class BackgroundTask:
    """One piece of work between passes, as profiles and error messages name it. A bucket can be used as well."""

    index: int
    step: int = -1
    """The backward pass that it belongs to; -1 where it belongs to none."""

    def describe(self) -> str:
        """The item's name in error messages."""
        return f"part {self.index}"


Subject = Bucket | BackgroundTask
"""A task works on one of these."""
T = TypeVar("T", bound=Subject)
Work = Callable[[T], Coroutine[Operation, Any, None]]


def run_items(
    items: Sequence[T], work: Work[T], executor: Executor, on_done: Callable[[T], None] | None = None
) -> None:
    """Run ``work(item)`` for each of ``items`` to the end, in the order of the buckets of a pass: while one packs or
    unpacks, another communicates. Calls ``on_done(item)`` when one is done."""
    executor.refresh_labels()
    pieces, wavefront = [Piece(BETWEEN_PASSES, work)], Wavefront(on_done)
    try:
        for item in items:
            wavefront.arrive(Task(pieces, executor, item, item), is_last=item is items[-1])
    except BaseException:
        wavefront.close()
        raise


def run_now(items: Sequence[T], work: Work[T], executor: Executor) -> None:
    """:func:`run_items` on the calling thread: ``executor`` has no worker. The current stream may use the results."""
    try:
        executor.submit(partial(run_items, items, work, executor))
    finally:
        executor.join()  # After a failure, too: what was queued before it uses the tensors.


def run_between_passes(background: Callable[..., dict[Any, Completion]], operation: Operation) -> None:
    """Run ``operation`` behind all work begun before, on the connections of the model whose ``background`` is that of
    :class:`StageContext`, and wait for it."""

    async def work(task: BackgroundTask) -> None:
        await operation

    (completion,) = background([BackgroundTask(index=0)], work).values()
    completion.wait()


class Completion:
    """The end of an item of work: :meth:`set` where it runs, :meth:`wait` where its result is needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_set = threading.Event()
        self._event: Any = None
        self._error: BaseException | None = None

    def set(self) -> None:
        """The item is done; on an accelerator, when the current stream has finished all work queued so far."""
        if has_streams(self._device):
            self._event = recorded_event(self._device)
        self._is_set.set()

    def fail(self, error: BaseException) -> None:
        """The work has failed, unless it is done already: :meth:`wait` raises ``error``."""
        if not self._is_set.is_set():
            self._error = _without_frames(error)
            self._is_set.set()

    def wait(self) -> None:
        """Block until the work is done; on an accelerator the current stream waits, not the host."""
        self._is_set.wait()
        if self._error is not None:
            raise _without_frames(self._error)
        if self._event is not None:
            current_stream(self._device).wait_event(self._event)


def _without_frames(error: BaseException) -> BaseException:
    """A copy of ``error``, with its last frames as a note.

    A frame of the training thread keeps all that called it, and so the model, whose reducer would keep the stage that
    keeps the error: no garbage collector sees that circle.
    """
    frames = "".join(traceback.format_tb(error.__traceback__, limit=-3)).rstrip()
    try:
        made = copy.copy(error)
    except Exception:
        made = error
    made.__cause__ = None if error.__cause__ is None else _without_frames(error.__cause__)
    made.__suppress_context__ = error.__suppress_context__
    made.__notes__ = [*getattr(error, "__notes__", ()), *([frames] if frames else [])]
    return made.with_traceback(None)
