"""One backward pass: its buckets, their futures, and what happens when something fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import torch

from overlap.errors import UnsupportedError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Operation
from overlap.hooks.engine.task import Executor, Task
from overlap.hooks.engine.wavefront import Wavefront
from overlap.hooks.stage import Stage

__all__ = ["BackwardPass"]

BucketFuture = torch.futures.Future[torch.Tensor]


class BackwardPass:
    """Drives the buckets of one backward pass.

    The futures always complete with the buckets' buffers, whatever happens: a hook that raises, or a future that
    fails, leaves DDP's reducer half finished and the model unusable. The first error is kept in ``error`` instead, to
    be raised when backward is over.
    """

    def __init__(
        self, step: int, stage: Stage, executor: Executor, on_failure: Callable[[BaseException], None]
    ) -> None:
        self.step = step
        self.error: BaseException | None = None
        self._stage = stage
        self._executor = executor
        self._on_failure = on_failure
        self._wavefront: Wavefront[Task] = Wavefront()
        self._unfinished: dict[int, tuple[BucketFuture, torch.Tensor]] = {}
        # The worker fails a pass while the training thread adds buckets to it.
        self._lock = threading.Lock()

    def admit(self, bucket: Bucket, future: BucketFuture) -> Task | None:
        """Take a bucket in, on the training thread; ``None`` once the pass has failed and nothing more is to run."""
        with self._lock:
            if self.error is None:
                self._unfinished[bucket.index] = (future, bucket.buffer)
            else:
                future.set_result(bucket.buffer)
                return None
        task = Task(
            bucket, self._parts(bucket), self._executor, lambda: self._complete(bucket.index), lane=bucket.index
        )
        if self._stage.starts_on_autograd_thread:
            task.start()
        return task

    def drive(self, task: Task, *, is_last: bool) -> None:
        """Let a bucket arrive in the wavefront, on the thread that drives the stages."""
        if self.error is not None:
            task.close()
            return
        try:
            # After a failure the ranks meet anew, in every pass: one that fails again is then heard again.
            self._executor.channels.open()
            self._wavefront.arrive(task, is_last=is_last)
        except BaseException as error:
            task.close()
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the pass: close what runs, hand every bucket back to DDP as it is, keep the first error.

        Called on the thread that drives the stages, or before the first bucket.
        """
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            unfinished, self._unfinished = self._unfinished, {}
        for task in self._wavefront.active:
            task.close()
        self._executor.wait_for_pass()
        self._on_failure(error)
        for future, buffer in unfinished.values():
            future.set_result(buffer)

    def wait(self) -> None:
        """Block until every bucket that was taken in is through."""
        with self._lock:
            futures = [future for future, _ in self._unfinished.values()]
        for future in futures:
            future.wait()

    def _parts(self, bucket: Bucket) -> Iterator[tuple[str, Coroutine[Operation, Any, None]]]:
        """Each stage of the chain in its turn."""
        for stage in self._stage.sequence:
            yield repr(stage), _run(stage, bucket)
            bucket = stage.passed(bucket)

    def _complete(self, index: int) -> None:
        with self._lock:
            future, buffer = self._unfinished.pop(index)
        future.set_result(buffer)


async def _run(stage: Stage, bucket: Bucket) -> None:
    if bucket.buffer.is_sparse:
        raise UnsupportedError(
            "this gradient is sparse, and stages work on dense ones: build the embedding with sparse=False, "
            "or leave this model to plain DDP"
        )
    await stage(bucket)
