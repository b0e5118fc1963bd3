"""Recording the steps of a training loop.

Inside the steps that are measured, only marks of a clock are taken and put into lists; they are read when the recording
is over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from overlap._torch.autograd import after_backward, after_gradients, in_backward
from overlap._torch.ddp import data_parallel_parameters
from overlap._torch.device import has_streams, recorded_event, synchronize
from overlap._torch.optimizer import only_watches
from overlap.errors import RegistrationError, TrainingLoopError
from overlap.hooks import AllReduce, Bucket, Chain, Registration, Role, Stage, chain
from overlap.hooks.collectives import Operation, WholePass
from overlap.hooks.engine.registration import registration_of
from overlap.hooks.engine.wavefront import BETWEEN_PASSES, Subject
from overlap.hooks.stage import walk
from overlap.ranks.board import of_all_ranks
from overlap.timeline.report import Activity, BucketReport, Kind, Phase, Report, StepReport, check_picture, save_reports

__all__ = ["Clock", "EventClock", "Recorder", "StepRecord", "Timeline", "clock_for", "read_steps"]

# Collectives of an update that make the mean; all others that it issues gather parameters.
_REDUCES = frozenset({"all_reduce", "reduce_scatter"})


class Timeline:
    """Records the steps that run inside a ``with`` block: what was computed, sent and updated, and when.

    Afterwards every rank calls :meth:`report`, which prints as a table, and :meth:`save`, for which rank 0 writes.
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
        self._recorder: Recorder | None = None
        self._kinds: Mapping[str, Role] = {}
        self._title = "plain DDP"
        self._cleanup = ExitStack()
        self._is_recording = False
        self._report: Report | None = None

    def __enter__(self) -> Self:
        if self._recorder is not None:
            raise TrainingLoopError("a Timeline records one block; make another for the next: overlap.Timeline(ddp)")
        with ExitStack() as cleanup:
            registration = self._observed(cleanup)
            self._kinds = _roles_of(registration.stage)
            self._recorder = Recorder(clock_for(next(iter(data_parallel_parameters(self._ddp))).device))
            registration.runtime.executor.observer = self._recorder
            cleanup.callback(setattr, registration.runtime.executor, "observer", None)
            cleanup.enter_context(_watching(self._ddp, self._recorder))
            self._cleanup = cleanup.pop_all()
        self._is_recording = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._recorder is not None
        self._is_recording = False
        if error is None:
            self._recorder.stop()
        self._cleanup.close()

    def _observed(self, cleanup: ExitStack) -> Registration:
        registration = registration_of(self._ddp) if isinstance(self._ddp, DistributedDataParallel) else None
        if registration is None:
            registration = chain(AllReduce()).register(self._ddp)
            cleanup.callback(registration.remove)
            return registration
        if (observer := registration.runtime.executor.observer) is not None:
            raise RegistrationError(
                f"{registration.stage!r} has an observer already ({type(observer).__name__}); "
                "leave that Timeline's block first"
            )
        self._title = repr(registration.stage)
        return registration

    @property
    def steps(self) -> tuple[StepReport, ...]:
        """This rank's own steps; issues nothing."""
        if self._recorder is None or self._is_recording:
            raise TrainingLoopError("a Timeline has its steps when its `with` block is over")
        return read_steps(self._recorder.steps, self._recorder.clock, self._kinds, rank=self._ddp.process_group.rank())

    def report(self) -> Report:
        """The steps of all ranks; every rank calls this (or :meth:`save`) after the block.

        Communication: in the first call ``all_gather_object`` on the model's process group.

        Raises:
            TrainingLoopError: the block is not over.
        """
        if self._report is None:
            ranks = of_all_ranks(self.steps, self._ddp.process_group)
            self._report = Report(title=self._title, ranks=tuple(ranks))
        return self._report

    def save(self, path: str | Path) -> None:
        """Draw the median step, as :func:`save_reports`. Every rank calls this, as :meth:`report`; rank 0 writes."""
        check_picture(path)  # On every rank: the others would wait for rank 0 in their next collective.
        report = self.report()
        if self._ddp.process_group.rank() == 0:
            save_reports({report.title: report}, path)


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
    """A stretch of a stage's code, or an operation that it awaited."""

    stage: str
    start: Any
    end: Any = None
    label: str | None = None
    """Of an operation."""
    sent_bytes: int = 0
    is_over: bool = False

    def complete(self, now: Any) -> None:
        """It, or part of it, is done. This may be called after the waiting thread has gone on already."""
        if not self.is_over:
            self.end = now


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
    """Takes marks for the training loop's hooks and, as an observer, for the engine that drives the stages."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.steps: list[StepRecord] = []
        self._step: StepRecord | None = None
        self._buckets: dict[tuple[int, int], _BucketRecord] = {}
        # Several of one bucket may be in flight: the gathers of its parts.
        self._in_flight: dict[Operation, _Record] = {}
        self._open: dict[str, Any] = {}
        self._is_in_backward = False
        self._training_thread = 0

    # The training loop.

    def before_forward(self, *, is_training: bool, syncs_buffers: bool) -> None:
        """``is_training``: it records gradients. Any other forward ends the step and is part of none."""
        now = self.clock.now()
        self._is_in_backward = False
        self._open.clear()
        if not is_training or self._step is None or self._step.had_backward:
            self._end_step(now)
        if is_training:
            self._training_thread = threading.get_ident()
            if self._step is None:
                self._step = StepRecord(now)
                self.steps.append(self._step)
            self._open["buffers" if syncs_buffers else "forward"] = now

    def follow(self, phase: str, following: str) -> None:
        """``phase``, if the loop is in it, ends, and ``following`` begins."""
        if phase in self._open:
            now = self.clock.now()
            self._close(phase, now)
            self._open[following] = now

    def on_output_gradient(self) -> None:
        """Inside backward: the gradient of an output of the model is there."""
        if self._step is None or self._is_in_backward:
            return
        self._is_in_backward = True
        self._step.had_backward = True
        now = self.clock.now()
        self._close("loss", now)
        self._open["backward"] = now
        after_gradients(lambda: self.follow("backward", "finalization"))
        after_backward(self._on_backward)

    def _on_backward(self) -> None:
        self._close("finalization", self.clock.now())
        self._is_in_backward = False

    def before_optimizer(self) -> None:
        """An optimizer's ``step()`` begins; one that calls another is taken as a whole."""
        if self._is_on_training_thread() and "optimizer" not in self._open:
            self._open["optimizer"] = self.clock.now()

    def after_optimizer(self) -> None:
        if self._is_on_training_thread():
            self._close("optimizer", self.clock.now())

    def stop(self) -> None:
        """The last step ends here."""
        self._end_step(self.clock.now())
        self._open.clear()

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
            # If no tensor was found in the model's output, the first bucket shows that backward has begun.
            self.on_output_gradient()
        record = _BucketRecord(bucket.index, bucket.buffer.nbytes, self.clock.now())
        self._step.buckets.append(record)
        self._buckets[bucket.step, bucket.index] = record

    def running(self, subject: Subject, label: str) -> None:
        if (bucket := self._buckets.get((subject.step, subject.index))) is not None:
            bucket.running = _Record(label, self.clock.now())
            bucket.records.append(bucket.running)

    def ran(self, subject: Subject, label: str) -> None:
        bucket = self._buckets.get((subject.step, subject.index))
        if bucket is not None and bucket.running is not None:
            bucket.running.end = self.clock.now()

    def launched(self, subject: Subject, label: str, operation: Operation) -> None:
        bucket = self._buckets.get((subject.step, subject.index))
        if bucket is None or isinstance(operation, WholePass):
            return
        launched = _Record(label, self.clock.now(), label=operation.label, sent_bytes=operation.sent_bytes)
        bucket.records.append(launched)
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
        if (over := self._in_flight.pop(operation, None)) is not None:
            if over.end is None:
                over.end = self.clock.now()
            over.is_over = True


@contextmanager
def _watching(ddp: DistributedDataParallel, recorder: Recorder) -> Iterator[None]:
    """Report every forward and backward of ``ddp`` and every optimizer's step to ``recorder``."""

    def before_forward(module: Any, inputs: Any) -> None:
        recorder.before_forward(is_training=torch.is_grad_enabled(), syncs_buffers=bool(ddp.will_sync_module_buffers()))

    def after_forward(module: Any, inputs: Any, output: Any) -> None:
        recorder.follow("forward", "loss")
        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: recorder.on_output_gradient())

    @only_watches
    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.after_optimizer()

    def eager(hook: Callable[..., None]) -> Any:
        return torch.compiler.disable(hook)  # It is not part of a compiled forward.

    with ExitStack() as handles:
        # Before all other hooks: code of a registered stage before a forward belongs to that step.
        handles.enter_context(ddp.register_forward_pre_hook(eager(before_forward), prepend=True))
        before_module = eager(lambda module, inputs: recorder.follow("buffers", "forward"))
        handles.enter_context(ddp.module.register_forward_pre_hook(before_module))
        handles.enter_context(ddp.register_forward_hook(eager(after_forward)))
        handles.enter_context(register_optimizer_step_pre_hook(lambda *_: recorder.before_optimizer()))
        handles.enter_context(register_optimizer_step_post_hook(after_step))
        yield


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        output = list(output.values())
    elif is_dataclass(output):
        output = [getattr(output, entry.name) for entry in fields(output)]
    if isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)


# From marks to milliseconds --------------------------------------------------------------------------------------


def _roles_of(root: Stage) -> dict[str, Role]:
    """The role of each stage, by the label that it runs under."""
    roles = {repr(stage): stage.role for stage in walk(root)}
    if isinstance(root, Chain):
        roles[repr(root)] = root.sequence[0].role  # Its own code only calls the first stage.
    return roles


def read_steps(
    records: Sequence[StepRecord], clock: Clock, roles: Mapping[str, Role], *, rank: int
) -> tuple[StepReport, ...]:
    """Each step with times from its own start."""
    clock.settle()
    steps = []
    for number, record in enumerate(records):
        if record.end is None:
            continue  # The recording was broken off inside of it.

        def read(mark: Any, record: StepRecord = record) -> float:
            return clock.elapsed_ms(record.start, record.end if mark is None else mark)

        phases = tuple(Phase(read(start), read(end), name) for name, start, end in record.phases)
        buckets = tuple(_read_bucket(bucket, read, roles) for bucket in record.buckets)
        step_ms = read(record.end)
        steps.append(StepReport(rank=rank, step=number, step_ms=step_ms, phases=phases, buckets=buckets))
    return tuple(steps)


def _read_bucket(bucket: _BucketRecord, read: Callable[[Any], float], roles: Mapping[str, Role]) -> BucketReport:
    activities = [
        Activity(
            read(one.start),
            read(one.end),
            _kind(one, roles),
            one.label or one.stage,
            is_collective=one.label is not None,
            sent_bytes=one.sent_bytes,
        )
        for one in bucket.records
    ]
    valid = sorted((one for one in activities if one.end_ms >= one.start_ms), key=lambda one: one.start_ms)
    return BucketReport(
        index=bucket.index, gradient_bytes=bucket.gradient_bytes, ready_ms=read(bucket.ready), activities=tuple(valid)
    )


def _kind(record: _Record, roles: Mapping[str, Role]) -> Kind:
    role = roles.get(record.stage)
    if record.stage == BETWEEN_PASSES:
        return "gather"  # Everything else that runs between passes belongs to no bucket.
    if role is Role.AVERAGER:
        return "average"
    if role is Role.TRANSFORM:
        return "transform"
    if role is not Role.UPDATE or record.label in _REDUCES:
        return "reduce"
    return "update" if record.label is None else "gather"
