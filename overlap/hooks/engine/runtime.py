"""The hook that DDP calls, and the thread that drives stages of CPU tensors."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from overlap._torch.autograd import after_backward, in_backward
from overlap._torch.c10d import GradBucket
from overlap.errors import CollectiveError
from overlap.hooks.bucket import Bucket
from overlap.hooks.collectives import Operation
from overlap.hooks.engine.background import background
from overlap.hooks.engine.backward_pass import BackwardPass, BucketFuture
from overlap.hooks.engine.channels import GroupChannels, PrivateChannels
from overlap.hooks.engine.executors import HostExecutor, StreamExecutor
from overlap.hooks.engine.task import Observer, Subject
from overlap.hooks.stage import Stage, StageContext, walk
from overlap.join import gradient_divisor

__all__ = ["Runtime", "Worker"]

T = TypeVar("T", bound=Subject)


class Worker:
    """A thread that runs what it is given, in order."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon, and one that refers to the queue alone: neither the interpreter's end nor the model's waits for it.
        threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True).start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        self._jobs.put(None)


@torch.no_grad()
def _run(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # Not kept alive until the next one comes: it holds a model's parameters.


class Runtime:
    """Drives one stage for one model.

    On CPU tensors a worker thread drives the stages, so that waiting does not hold up autograd, over connections of
    its own. On accelerators, and where the process group has no Gloo, they run on autograd's thread, where the order
    of collectives is the program's own.
    """

    def __init__(self, stage: Stage, context: StageContext) -> None:
        self._stage = stage
        self._context = replace(context, background=self.background)
        self._pass: BackwardPass | None = None
        self._steps = 0
        self._is_open = False
        self._attached: list[Stage] = []
        self._worker: Worker | None = None
        self._executor: HostExecutor | StreamExecutor
        if context.device.type == "cpu":
            if PrivateChannels.can_serve(context.group):
                self._executor = HostExecutor(PrivateChannels(context.group))
                self._worker = Worker(f"overlap-{id(self):x}")
                self._stop_worker = weakref.finalize(self, self._worker.stop)
            else:
                self._executor = HostExecutor(GroupChannels(context.group))
        else:
            self._executor = StreamExecutor(GroupChannels(context.group), context.device)

    @property
    def stage(self) -> Stage:
        """What this runtime drives."""
        return self._stage

    @property
    def observer(self) -> Observer | None:
        """Is told of every piece of work, where set."""
        return self._executor.observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._executor.observer = observer

    def open(self) -> None:
        """Attach the stages, connect with the other ranks and make sure that they run the same plan.

        Raises:
            ConfigurationError: a stage refuses the model.
            CollectiveError: another rank did not come, or registered something else.
        """
        for stage in walk(self._stage):
            stage.attach(self._context)
            self._attached.append(stage)
        self._is_open = True
        channels = self._executor.channels
        channels.open()
        if (failures := channels.failures) is None:
            return
        plan = f"{self._stage.signature} for {self._context.describe()}"
        if (other := failures.agree(plan)) is not None:
            error = CollectiveError(
                f"rank {self._context.group.rank()} registers {plan}, but rank 0 registers {other}; "
                "every rank must run the same stages for the same model"
            )
            failures.report(error)
            raise error

    def close(self) -> None:
        """Detach the stages and end the thread and its connections."""
        for stage in self._attached:
            stage.detach()
        self._attached.clear()
        if self._worker is not None:
            self._stop_worker()
        self._executor.channels.abort()

    def before_forward(self) -> None:
        """To be called before a forward that records gradients."""
        for stage in walk(self._stage):
            stage.before_forward()

    def on_bucket(self, raw: GradBucket) -> BucketFuture:
        """Take in a bucket, as DDP's hook: on autograd's thread, in buckets' order."""
        is_replay = not in_backward()
        if self._pass is None or raw.index() == 0:
            self._pass = self._begin(is_replay=is_replay)
        current = self._pass
        bucket = self._bucket(raw, is_replay=is_replay)
        future: BucketFuture = torch.futures.Future(
            devices=None if self._context.device.type == "cpu" else [self._context.device]
        )
        if (observer := self.observer) is not None:
            observer.arrived(bucket)
        self._executor.begin(bucket.index)
        if bucket.is_last and not is_replay:
            after_backward(lambda: self._finish(current))
        task = current.admit(bucket, future)
        if task is not None:
            self._submit(lambda: current.drive(task, is_last=bucket.is_last))
        if bucket.is_last and is_replay:
            current.wait()
            self._finish(current)
        return future

    def background(
        self,
        items: Sequence[T],
        work: Callable[[T], Coroutine[Operation, Any, None]],
        *,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Run ``work`` on each of ``items`` behind all that was begun before; returns at once where a worker runs it.

        Called on the training thread, between backward passes, at the same place on every rank.
        """
        self._executor.begin_background()

        def job() -> None:
            try:
                background(items, work, self._executor)
            except BaseException as error:
                self._on_failure(error)
                on_failure(error)

        self._submit(job)

    def _submit(self, job: Callable[[], None]) -> None:
        if self._worker is not None:
            self._worker.submit(job)
        else:
            with torch.no_grad():
                job()

    def _begin(self, *, is_replay: bool) -> BackwardPass:
        if self._pass is not None:
            stale = self._pass
            self._submit(lambda: stale.fail(RuntimeError("a new backward began before all buckets had come")))
            stale.wait()
        begun = BackwardPass(self._steps, self._stage, self._executor, self._on_failure)
        self._steps += 1
        try:
            if not self._is_open:  # Registered as a hook: this is the first that we see of the model.
                self.open()
            for stage in walk(self._stage):
                stage.before_backward(is_replay=is_replay)
        except Exception as error:
            error.add_note(f"raised by {self._stage!r} before the first bucket of step {begun.step}")
            begun.fail(error)
        return begun

    def _finish(self, finished: BackwardPass) -> None:
        """On the training thread, when DDP has set the gradients."""
        self._pass = None
        error = finished.error
        for stage in walk(self._stage):
            note = stage.after_backward(failed=error is not None)
            if note and error is not None:
                error.add_note(note)
        if error is not None:
            self._executor.channels.settle()
            raise error

    def _on_failure(self, error: BaseException) -> None:
        """Tell the other ranks, then cut the connections, so that they need not run into their timeout."""
        channels = self._executor.channels
        # What another rank caused is its own to report.
        if not isinstance(error, CollectiveError):
            with contextlib.suppress(Exception):
                channels.open()  # Where the last pass failed too, the others are met only here.
            if channels.failures is not None:
                channels.failures.report(error)
        channels.abort()

    def _bucket(self, raw: GradBucket, *, is_replay: bool) -> Bucket:
        parameters = tuple(raw.parameters())
        names = self._context.names
        assert self._pass is not None
        return Bucket(
            index=raw.index(),
            is_last=raw.is_last(),
            buffer=raw.buffer(),
            parameters=parameters,
            group=self._context.group,
            divisor=gradient_divisor(self._context.group),
            step=self._pass.step,
            is_replay=is_replay,
            raw=raw,
            fqns=None if names is None else tuple(names.get(parameter, "unknown") for parameter in parameters),
        )
