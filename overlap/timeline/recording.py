"""Recording the steps of a training loop.

Inside the steps that are measured, only marks of a clock are taken and put into lists; they are read when the recording
is over.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from overlap._torch.autograd import after_backward, after_gradients, in_backward
from overlap._torch.ddp import data_parallel_parameters, tensors_in
from overlap._torch.device import has_streams, recorded_event, synchronize
from overlap._torch.optimizer import only_watches
from overlap.errors import RegistrationError, TrainingLoopError
from overlap.hooks import AllReduce, Bucket, Chain, Role, Stage, chain
from overlap.hooks.collectives import Operation, WholePass
from overlap.hooks.engine.registration import registration_of
from overlap.hooks.engine.wavefront import BETWEEN_PASSES, Subject
from overlap.hooks.stage import walk
from overlap.ranks.board import of_all_ranks
from overlap.timeline.report import Activity, BucketReport, Kind, Report, Span, StepReport, trace_events

# Collectives of an update that make the mean; all others that it issues gather parameters.
_REDUCES = frozenset({"all_reduce", "reduce_scatter"})


class Timeline:
    """Records the steps that run inside a ``with`` block: the times of computation, communication and updates.

    Afterwards every rank calls :meth:`report`, which prints as a table, and :meth:`export_chrome_trace`, for which
    rank 0 writes.
    A step runs from the start of a forward that records gradients to the start of the next one after its backward;
    under ``no_sync`` every micro-batch is one. A forward under ``torch.no_grad`` ends the step and is not part of any.

    *On the CPU* times are the host's: a collective lasts from its launch to its completion (point-to-point ones: until
    they have been waited for). *On CUDA* they are those of events on the streams; nothing waits for the device before
    :meth:`report`.

    A model without a registered stage gets ``chain(AllReduce())`` for the length of the block, which reduces bit for
    bit as plain DDP does; then every rank must enter the block, between two steps.

    Args:
        ddp: the model; to compile it, compile the module inside: ``DistributedDataParallel(torch.compile(module))``.

    Communication: none while it records with a stage registered. :meth:`report` gathers once.

    Raises:
        RegistrationError: ``ddp`` is not a DDP model, has a hook that was not registered with :func:`overlap.register`,
            or is being recorded already.

    >>> with Timeline(ddp) as timeline:
    ...     for x, y in loader:
    ...         loss_fn(ddp(x), y).backward()
    >>> len(timeline.report().steps)  # print(timeline.report()) shows them
    4
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._title = "plain DDP"
        self._recorder: Recorder | None = None
        self._cleanup = ExitStack()
        self._is_over = False
        self._report: Report | None = None

    def __enter__(self) -> Self:
        if self._recorder is not None:
            raise TrainingLoopError("a Timeline records one block; make another for the next: overlap.Timeline(ddp)")
        registration = registration_of(self._ddp) if isinstance(self._ddp, DistributedDataParallel) else None
        with ExitStack() as cleanup:
            if registration is None:
                registration = chain(AllReduce()).register(self._ddp)
                cleanup.callback(registration.remove)
            elif (observer := registration.runtime.executor.observer) is not None:
                raise RegistrationError(
                    f"{registration.stage!r} has an observer already ({type(observer).__name__}); "
                    "leave that Timeline's block first"
                )
            else:
                self._title = repr(registration.stage)
            clock = clock_for(next(iter(data_parallel_parameters(self._ddp))).device)
            recorder = registration.runtime.executor.observer = Recorder(clock, _roles_of(registration.stage))
            cleanup.callback(setattr, registration.runtime.executor, "observer", None)
            cleanup.enter_context(recorder.watching(self._ddp))
            self._recorder, self._cleanup = recorder, cleanup.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and self._recorder is not None:
            self._recorder.stop()
        self._is_over = True
        self._cleanup.close()

    @property
    def steps(self) -> tuple[StepReport, ...]:
        """This rank's own steps; issues nothing."""
        if self._recorder is None or not self._is_over:
            raise TrainingLoopError("a Timeline has its steps when its `with` block is over")
        return self._recorder.read(rank=self._ddp.process_group.rank())

    def report(self) -> Report:
        """The steps of all ranks; every rank calls this (or :meth:`export_chrome_trace`) after the block.

        Communication: in the first call ``all_gather_object`` on the model's process group.

        Raises:
            TrainingLoopError: the block is not over.
        """
        if self._report is None:
            ranks = of_all_ranks(self.steps, self._ddp.process_group)
            self._report = Report(title=self._title, ranks=tuple(ranks))
        return self._report

    def export_chrome_trace(self, path: str | Path) -> None:
        """Write the steps of all ranks as ``torch.profiler`` writes a trace, for ``ui.perfetto.dev`` and
        ``chrome://tracing``. Every rank calls this, as :meth:`report`; rank 0 writes."""
        report = self.report()
        if self._ddp.process_group.rank() == 0:
            Path(path).write_text(json.dumps({"traceEvents": list(trace_events(report))}))


class Clock:
    """The host's clock. A mark is taken now, and read later, when that delays nothing."""

    is_host = True
    """Whether a thread may take a mark when a collective completes."""

    def now(self) -> Any:
        """A mark for this moment (on an accelerator: when the current stream gets to it)."""
        return time.perf_counter_ns()

    def settle(self) -> None:
        """Wait until every mark can be read."""

    def elapsed_ms(self, start: Any, end: Any) -> float:
        """From one mark to another; the closer they are, the finer it is."""
        return float(end - start) / 1e6


class EventClock(Clock):
    """Marks are events on the current stream of ``device``."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        return recorded_event(self._device, is_timed=True)

    def settle(self) -> None:
        synchronize(self._device)

    def elapsed_ms(self, start: Any, end: Any) -> float:
        # A float32: in steps of 0.00003 ms within half a second, and of 0.06 ms over ten minutes.
        return start.elapsed_time(end)  # type: ignore[no-any-return]


def clock_for(device: torch.device) -> Clock:
    """The clock that sees the work of ``device``."""
    return EventClock(device) if has_streams(device) else Clock()


@dataclass(slots=True)
class _Record:
    """The marks that an :class:`Activity` is read from."""

    kind: Kind
    label: str
    is_collective: bool
    sent_bytes: int
    start: Any
    end: Any = None


@dataclass(slots=True)
class _BucketRecord:
    index: int
    gradient_bytes: int
    ready: Any
    records: list[_Record] = field(default_factory=list)
    running: _Record | None = None


@dataclass(slots=True)
class StepRecord:
    """From the start of a forward to the start of the next one that follows a backward."""

    start: Any
    end: Any = None
    phases: list[tuple[Any, Any, Any]] = field(default_factory=list)
    buckets: list[_BucketRecord] = field(default_factory=list)
    had_backward: bool = False


class Recorder:
    """Takes marks in the training loop's hooks and, as an observer, for the engine that drives the stages; ``roles``
    are those of the stages, by the labels that they run under."""

    def __init__(self, clock: Clock, roles: Mapping[str, Role]) -> None:
        self.clock = clock
        self.steps: list[StepRecord] = []
        self._roles = roles
        self._step: StepRecord | None = None
        self._buckets: dict[tuple[int, int], _BucketRecord] = {}
        # Several of one bucket may be in flight: the gathers of its parts.
        self._in_flight: dict[Operation, _Record] = {}
        self._open: dict[str, Any] = {}
        """The starts of the phases that the training loop is in."""
        self._training_thread = 0

    @contextmanager
    def watching(self, ddp: DistributedDataParallel) -> Iterator[None]:
        """Follow every forward and backward of ``ddp``, and every optimizer's step."""

        def before_optimizer(*_: Any) -> None:
            # One that calls another is taken as a whole.
            if self._is_on_training_thread() and "optimizer" not in self._open:
                self._open["optimizer"] = self.clock.now()

        @only_watches
        def after_optimizer(*_: Any) -> None:
            if self._is_on_training_thread():
                self._close("optimizer")

        def before_module(module: Any, inputs: Any) -> None:
            self._follow("buffers", "forward")

        eager: Callable[..., Any] = torch.compiler.disable  # They are not part of a compiled forward.
        with ExitStack() as handles:
            # Before all other hooks: code of a registered stage before a forward belongs to that step.
            handles.enter_context(ddp.register_forward_pre_hook(eager(self._before_forward), prepend=True))
            handles.enter_context(ddp.module.register_forward_pre_hook(eager(before_module)))
            handles.enter_context(ddp.register_forward_hook(eager(self._after_forward)))
            handles.enter_context(register_optimizer_step_pre_hook(before_optimizer))
            handles.enter_context(register_optimizer_step_post_hook(after_optimizer))
            yield

    def stop(self) -> None:
        """The last step ends here."""
        self._end_step(self.clock.now())

    # The training loop.

    def _before_forward(self, ddp: Any, inputs: Any) -> None:
        now = self.clock.now()
        self._open.clear()
        is_training = torch.is_grad_enabled()
        # Any other forward ends the step and is part of none.
        if not is_training or self._step is None or self._step.had_backward:
            self._end_step(now)
        if is_training:
            self._training_thread = threading.get_ident()
            if self._step is None:
                self._step = StepRecord(now)
                self.steps.append(self._step)
            self._open["buffers" if ddp.will_sync_module_buffers() else "forward"] = now

    def _after_forward(self, ddp: Any, inputs: Any, output: Any) -> None:
        self._follow("forward", "loss")
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._on_output_gradient())

    def _on_output_gradient(self) -> None:
        """Inside backward: the gradient of an output of the model is there."""
        if self._step is None or self._open.keys() & {"backward", "finalization"}:
            return
        self._step.had_backward = True
        self._open["backward"] = self._close("loss")
        after_gradients(lambda: self._follow("backward", "finalization"))
        after_backward(lambda: self._close("finalization"))

    def _follow(self, phase: str, following: str) -> None:
        """``phase``, if the loop is in it, ends, and ``following`` begins."""
        if phase in self._open:
            self._open[following] = self._close(phase)

    def _close(self, phase: str) -> Any:
        """``phase``, if the loop is in it, ends now."""
        now = self.clock.now()
        if self._step is not None and phase in self._open:
            self._step.phases.append((phase, self._open.pop(phase), now))
        return now

    def _end_step(self, now: Any) -> None:
        if self._step is not None:
            self._step.end = now
            self._step = None

    def _is_on_training_thread(self) -> bool:
        return self._step is not None and threading.get_ident() == self._training_thread

    # The observer of a registration. A rank that replays for others has no step to record it in.

    def arrived(self, bucket: Bucket) -> None:
        if self._step is None or bucket.is_replay:
            return
        if in_backward():
            # If no tensor was found in the model's output, the first bucket shows that backward has begun.
            self._on_output_gradient()
        record = _BucketRecord(bucket.index, bucket.buffer.nbytes, self.clock.now())
        self._step.buckets.append(record)
        self._buckets[bucket.step, bucket.index] = record

    def running(self, subject: Subject, label: str) -> None:
        if (bucket := self._buckets.get((subject.step, subject.index))) is not None:
            bucket.running = _Record(self._kind(label), label, False, 0, self.clock.now())
            bucket.records.append(bucket.running)

    def ran(self, subject: Subject, label: str) -> None:
        bucket = self._buckets.get((subject.step, subject.index))
        if bucket is not None and bucket.running is not None:
            bucket.running.end = self.clock.now()

    def launched(self, subject: Subject, label: str, operation: Operation) -> None:
        bucket = self._buckets.get((subject.step, subject.index))
        if bucket is None or isinstance(operation, WholePass):
            return
        kind, name = self._kind(label, operation.label), operation.label
        launched = _Record(kind, name, True, operation.sent_bytes, self.clock.now())
        bucket.records.append(launched)
        self._in_flight[operation] = launched

        def complete() -> None:
            now = self.clock.now()  # Before the question: the waiting thread may go on after it.
            if self._in_flight.get(operation) is launched:
                launched.end = now

        if self.clock.is_host:
            # When it, or a part of it, completes, not when the worker comes to wait for it.
            operation.when_done(complete)

    def waiting(self, subject: Subject, operation: Operation) -> None:
        if self.clock.is_host and self._is_on_training_thread():
            self._open["wait"] = self.clock.now()

    def finished(self, subject: Subject, operation: Operation) -> None:
        if self.clock.is_host and self._is_on_training_thread():
            self._close("wait")
        over = self._in_flight.pop(operation, None)
        if over is not None and over.end is None:
            over.end = self.clock.now()

    def _kind(self, stage: str, operation: str | None = None) -> Kind:
        """Of a stage's code, or of an operation that it awaits."""
        if stage == BETWEEN_PASSES:
            return "gather"  # Everything else that runs between passes belongs to no bucket.
        role = self._roles.get(stage)
        if role is Role.AVERAGER:
            return "average"
        if role is Role.TRANSFORM:
            return "transform"
        if role is not Role.UPDATE or operation in _REDUCES:
            return "reduce"
        return "update" if operation is None else "gather"

    # From marks to milliseconds.

    def read(self, *, rank: int) -> tuple[StepReport, ...]:
        """Each step with times from its own start."""
        self.clock.settle()
        return tuple(
            StepReport(
                rank=rank,
                step=number,
                step_ms=self.clock.elapsed_ms(record.start, record.end),
                phases=tuple(Span(*self._times(record, start, end), name) for name, start, end in record.phases),
                buckets=tuple(self._read_bucket(record, bucket) for bucket in record.buckets),
            )
            for number, record in enumerate(self.steps)
            if record.end is not None  # The recording was broken off inside of it.
        )

    def _read_bucket(self, step: StepRecord, bucket: _BucketRecord) -> BucketReport:
        activities = [
            Activity(*self._times(step, one.start, one.end), one.kind, one.label, one.is_collective, one.sent_bytes)
            for one in bucket.records
        ]
        return BucketReport(
            index=bucket.index,
            gradient_bytes=bucket.gradient_bytes,
            ready_ms=self.clock.elapsed_ms(step.start, bucket.ready),
            activities=tuple(sorted((one for one in activities if one.duration_ms >= 0), key=lambda one: one.start_ms)),
        )

    def _times(self, step: StepRecord, start: Any, end: Any) -> tuple[float, float]:
        """From the step's start; a record without an end lasts until the end of the step."""
        since = self.clock.elapsed_ms
        return since(step.start, start), since(step.start, step.end if end is None else end)


def _roles_of(root: Stage) -> dict[str, Role]:
    """The role of each stage, by the label that it runs under."""
    roles = {repr(stage): stage.role for stage in walk(root)}
    if isinstance(root, Chain):
        roles[repr(root)] = root.sequence[0].role  # Its own code only calls the first stage.
    return roles
