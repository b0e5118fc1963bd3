"""One backward pass: its buckets, their futures, and what happens when something fails."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from overlap._torch.profiling import label_type
from overlap.hooks.bucket import Bucket
from overlap.hooks.context import BucketWatcher
from overlap.hooks.engine.executors import BucketFuture, Executor
from overlap.hooks.engine.wavefront import Part, Task, Wavefront

__all__ = ["AbandonedBackwardError", "BackwardPass"]

_ABANDONED = "backward ended with an error outside of the stages, which that rank has raised"


class AbandonedBackwardError(RuntimeError):
    """Stands for an error of the model's own in backward, where only autograd knows it."""

    def __init__(self) -> None:
        super().__init__(_ABANDONED)

    @staticmethod
    def caused(error: BaseException | None) -> bool:
        """Whether ``error`` is one, on this rank or on another, so that DDP has a backward that it cannot finish."""
        return _ABANDONED in str(error)


class BackwardPass:
    """Runs the stages on the buckets of one backward pass.

    The futures always complete with the buckets' buffers: if a hook raised, or a future failed, DDP's reducer would
    stay half finished and the model unusable. Instead the first error is kept in ``error``, to be raised when backward
    is over.

    Args:
        step: the number of the pass.
        parts: the stages that run.
        executor: where they run.
        divisor: of all its buckets.
        watchers: are notified when a bucket arrives, and when it is through.
    """

    def __init__(
        self,
        step: int,
        parts: Sequence[Part],
        executor: Executor,
        *,
        divisor: int,
        watchers: Sequence[BucketWatcher] = (),
    ) -> None:
        self.step = step
        self.divisor = divisor
        """Of all buckets: who takes part does not change within a pass."""
        self.error: BaseException | None = None
        self.executor = executor
        self._parts = parts
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
        return Task(bucket, given, self._parts, self.executor, labelled=self._labelled, on_done=self._complete)

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
        """End the pass: keep the first error, close what runs, return every bucket to DDP as it is.

        Called on the thread that runs the stages, or before the first bucket.
        """
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
