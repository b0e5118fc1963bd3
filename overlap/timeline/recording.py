"""What happens in a step, written down as it happens: marks of a clock, to be read when the recording is over.

Everything here runs inside the steps that are measured, so it takes a mark, puts it into a list and returns.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from overlap._torch.autograd import after_backward, after_gradients, in_backward
from overlap.hooks import Bucket
from overlap.hooks.collectives import Operation, WholePass
from overlap.hooks.engine.executors import Subject
from overlap.timeline.clock import Clock

__all__ = ["BucketRecord", "CodeRecord", "OperationRecord", "Recorder", "StepRecord"]


@dataclass(slots=True)
class CodeRecord:
    """A stretch of a stage's code."""

    stage: str
    start: Any
    end: Any = None


@dataclass(slots=True)
class OperationRecord:
    """Something that a stage awaited."""

    stage: str
    label: str
    sent_bytes: int
    start: Any
    end: Any = None
    is_over: bool = False

    def complete(self, now: Any) -> None:
        """It, or part of it, is done. This may be called after the waiting thread has gone on already."""
        if not self.is_over:
            self.end = now


@dataclass(slots=True)
class BucketRecord:
    """One bucket of one backward pass."""

    index: int
    gradient_bytes: int
    ready: Any
    code: list[CodeRecord] = field(default_factory=list)
    operations: list[OperationRecord] = field(default_factory=list)


@dataclass(slots=True)
class StepRecord:
    """From the start of a forward to the start of the next one that follows a backward."""

    start: Any
    end: Any = None
    phases: list[tuple[str, Any, Any]] = field(default_factory=list)
    buckets: list[BucketRecord] = field(default_factory=list)
    had_backward: bool = False


class Recorder:
    """Takes marks for the training loop's hooks and, as an observer, for what drives the stages."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.steps: list[StepRecord] = []
        self._step: StepRecord | None = None
        self._buckets: dict[tuple[int, int], BucketRecord] = {}
        # Several of one bucket may be in flight: the gathers of its parts.
        self._in_flight: dict[Operation, OperationRecord] = {}
        self._open: dict[str, Any] = {}
        self._is_in_backward = False
        self._training_thread = 0

    # The training loop.

    def before_forward(self, *, is_training: bool, syncs_buffers: bool) -> None:
        """``is_training``: it records gradients. Any other forward ends the step and is part of none."""
        now = self.clock.now()
        self._is_in_backward = False
        self._open.clear()
        if not is_training:
            self._end_step(now)
            return
        self._training_thread = threading.get_ident()
        if self._step is None or self._step.had_backward:
            self._end_step(now)
            self._step = StepRecord(now)
            self.steps.append(self._step)
        self._open["buffers" if syncs_buffers else "forward"] = now

    def before_module(self) -> None:
        """DDP's own preparation is over, and the module's forward begins."""
        if "buffers" in self._open:
            now = self.clock.now()
            self._close("buffers", now)
            self._open["forward"] = now

    def after_forward(self) -> None:
        """The module's output is there."""
        if "forward" in self._open:
            now = self.clock.now()
            self._close("forward", now)
            self._open["loss"] = now

    def on_output_gradient(self) -> None:
        """Inside backward: the gradient of an output of the model is there."""
        if self._step is None or self._is_in_backward:
            return
        self._is_in_backward = True
        self._step.had_backward = True
        now = self.clock.now()
        self._close("loss", now)
        self._open["backward"] = now
        after_gradients(self._on_gradients)
        after_backward(self._on_backward)

    def before_optimizer(self) -> None:
        """An optimizer's ``step()`` begins; one that calls another is taken as a whole."""
        if self._is_on_training_thread() and "optimizer" not in self._open:
            self._open["optimizer"] = self.clock.now()

    def after_optimizer(self) -> None:
        """It has ended."""
        if self._is_on_training_thread():
            self._close("optimizer", self.clock.now())

    def stop(self) -> None:
        """The last step ends here."""
        self._end_step(self.clock.now())
        self._open.clear()

    def _on_gradients(self) -> None:
        now = self.clock.now()
        self._close("backward", now)
        self._open["finalization"] = now

    def _on_backward(self) -> None:
        self._close("finalization", self.clock.now())
        self._is_in_backward = False

    def _end_step(self, now: Any) -> None:
        if self._step is not None:
            self._step.end = now
            self._step = None

    def _close(self, name: str, now: Any) -> None:
        start = self._open.pop(name, None)
        if start is not None and self._step is not None:
            self._step.phases.append((name, start, now))

    def _is_on_training_thread(self) -> bool:
        return self._step is not None and threading.get_ident() == self._training_thread

    # The observer of a registration. A rank that replays for others has no step to record it in.

    def arrived(self, bucket: Bucket) -> None:
        if self._step is None or bucket.is_replay:
            return
        if in_backward():
            # Where the output holds tensors that were not found, the first bucket shows that backward has begun.
            self.on_output_gradient()
        record = BucketRecord(bucket.index, bucket.buffer.nbytes, self.clock.now())
        self._step.buckets.append(record)
        self._buckets[bucket.step, bucket.index] = record

    def running(self, subject: Subject, label: str) -> None:
        if (record := self._record_of(subject)) is not None:
            record.code.append(CodeRecord(label, self.clock.now()))

    def ran(self, subject: Subject, label: str) -> None:
        if (record := self._record_of(subject)) is not None and record.code:
            record.code[-1].end = self.clock.now()

    def launched(self, subject: Subject, label: str, operation: Operation) -> None:
        if (record := self._record_of(subject)) is None or isinstance(operation, WholePass):
            return
        launched = OperationRecord(label, operation.label, operation.sent_bytes, self.clock.now())
        record.operations.append(launched)
        self._in_flight[operation] = launched
        if self.clock.is_host:
            # When it completes, not when the worker comes to wait for it.
            operation.when_done(lambda: launched.complete(self.clock.now()))

    def waiting(self, subject: Subject, operation: Operation) -> None:
        if self.clock.is_host and self._is_on_training_thread():
            self._open["wait"] = self.clock.now()

    def finished(self, subject: Subject, operation: Operation) -> None:
        if self.clock.is_host and self._is_on_training_thread():
            self._close("wait", self.clock.now())
        if (over := self._in_flight.pop(operation, None)) is None:
            return
        if over.end is None:
            over.end = self.clock.now()
        over.is_over = True

    def _record_of(self, subject: Subject) -> BucketRecord | None:
        return self._buckets.get((subject.step, subject.index))
