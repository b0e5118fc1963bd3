"""Where a stage's code runs, and how it waits there for a collective.

[Note: small models]

A worker thread lets the stages of one bucket run while autograd computes the next, at the price of a hand-over between
threads for each bucket. Where all of a model takes less time than that, or there is one bucket, which comes when
nothing is left to compute, stages run on autograd's thread, in the same order. The limit is the size of DDP's first
bucket, which is sent at once anyhow. A chain with a communication hook runs there, too: the hook may use the model's
own group, on which the thread of training issues its collectives.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from overlap._checks import refuse_capture
from overlap._threads import start
from overlap._torch.autograd import LabelType, label_type, run_as_step, run_without_saved_context
from overlap._torch.c10d import backend_name, has_lost_connection
from overlap._torch.ddp import data_parallel_parameters
from overlap._torch.device import current_stream, future_for, has_streams, new_event, stream_of, streams
from overlap.errors import CollectiveError
from overlap.hooks.collectives import Operation
from overlap.hooks.engine.channels import Channels
from overlap.hooks.stage import Stage, walk
from overlap.ranks.board import as_collective_error, failures_explained

BucketFuture = torch.futures.Future[torch.Tensor]
_Job = Callable[[], None]

# Before the training stream: a message leaves earlier if it need not be encoded behind the blocks of a large kernel.
# It does not outrank the collectives of the library's own groups, which have the highest: see ``new_group_of``.
_PRIORITY = -1
# How long a thread waits for a collective before it polls whether another rank has reported a failure.
_POLL_INTERVAL = timedelta(seconds=1)
# How often a wait for the worker looks whether its thread has ended.
_LOOKING_S = 0.1

SMALL_BYTES = 2**20
"""A model of at most so many bytes is small; with 0 none is."""


def runs_inline(ddp: DistributedDataParallel) -> bool:
    """Whether stages of this model on CPU tensors run on autograd's thread. See [Note: small models]."""
    trained = [parameter for parameter in data_parallel_parameters(ddp) if parameter.requires_grad]
    nbytes = sum(parameter.nbytes for parameter in trained)
    # By default DDP's first bucket is smaller than the others.
    fits_a_bucket = not ddp.bucket_bytes_cap_default and nbytes <= ddp.bucket_bytes_cap
    has_one_bucket = len(trained) == 1 or (fits_a_bucket and len({parameter.dtype for parameter in trained}) == 1)
    return SMALL_BYTES > 0 and (has_one_bucket or nbytes <= SMALL_BYTES)


class Labels(dict[tuple[str, int], AbstractContextManager[Any]]):
    """The labels in profiles of what runs, by the name of a stage or an operation and the bucket, made on first use."""

    def __init__(self, labelled: LabelType) -> None:
        self.labelled = labelled

    def __missing__(self, key: tuple[str, int]) -> AbstractContextManager[Any]:
        name, index = key
        made = self[key] = self.labelled(f"overlap::{name}[bucket {index}]")
        return made


class Executor:
    """Where stages run: here those of CPU tensors, on a worker's thread or, without a ``worker``, on the caller's.

    To wait is to block that thread, and to poll whether another rank has failed.
    """

    observer: Any = None
    """If set, notified on the thread where something happens and, on accelerators, with its stream current:
    ``arrived(bucket)``; ``running(subject, label)`` and ``ran(subject, label)`` around a stage's code, up to its next
    operation; ``launched(subject, label, operation)``, ``waiting(subject, operation)`` and ``finished(subject,
    operation)``, unless it has failed. A subject is a bucket or an item of work between passes, a label the stage's
    ``repr``. So a :class:`~overlap.Timeline` records."""
    _device = torch.device("cpu")
    new_future: Callable[[], BucketFuture] = BucketFuture
    """Makes a future for DDP: to wait for it is to wait for what the job that completes it has done."""

    def __init__(self, channels: Channels, worker: Worker | None = None) -> None:
        self.channels, self.worker = channels, worker
        self.labels = Labels(label_type())
        if worker is not None:
            self.submit = worker.submit  # type: ignore[method-assign]

    def for_pass(self, step: int) -> Executor:
        """The executor of what belongs to backward pass number ``step``, or to none (-1)."""
        return self

    def submit(self, job: _Job) -> None:
        """Run ``job`` after what the caller has done so far, in the modes of an optimizer's step; without a worker, at
        once, and raise what it raises."""
        run_without_saved_context(job, self._device.type)

    def refresh_labels(self) -> None:
        """A pass, or work between passes, begins: a profiler may have been started or stopped."""
        if (labelled := label_type()) is not self.labels.labelled:
            self.labels = Labels(labelled)

    def join(self) -> None:
        """Make what the caller does next wait for the jobs so far; within a job, the one who has submitted it."""

    def launch(self, operation: Operation) -> None:
        """Start ``operation``; returns at once. Raises: CollectiveError: another rank has failed."""
        try:
            operation.launch(self.channels)
        except RuntimeError as error:
            if isinstance(error, CollectiveError) or not has_lost_connection(error):
                raise
            raise as_collective_error(error, "could not be launched", self.channels.board) from error

    def wait(self, work: dist.Work) -> None:
        """Make what follows in a job wait for ``work``. Raises: CollectiveError: another rank has failed."""
        board = self.channels.board
        if board is None:
            with failures_explained():
                work.wait()
            return
        start_s = time.monotonic()
        while True:
            is_over = work.is_completed()  # Asked before: it may be done a moment after the wait has timed out.
            try:
                if is_over:
                    work.wait()
                else:
                    work.wait(_POLL_INTERVAL)
                return
            except RuntimeError as error:
                if is_over:
                    raise as_collective_error(
                        error, f"failed after {time.monotonic() - start_s:.1f} s", board
                    ) from error
                board.poll()

    def abandon(self, operation: Operation) -> None:
        """Make what follows in a job wait for an operation in flight that was given up.

        Not here, where another rank may not arrive: the connections are closed, which ends it.
        """


class StreamExecutor(Executor):
    """Of accelerator tensors: the side stream of ``owner``, made on first use, or where that is ``None`` the current
    stream. To wait is to make that stream wait, never the host.

    [Note: one stream]

    All that runs for a model runs on one stream, in the order in which it is called, so pieces wait for each other
    without events. Nothing is late by that: collectives of one group run in the order of their launch, and the
    scheduler waits for each only when the next one has been launched. What a stage allocates belongs to the stream, and
    a work keeps its tensors alive until it is waited for. More in ``design/streams.md``.

    [Note: the first pass]

    In DDP's first pass one bucket has the gradients of the whole model. A side stream would keep workspace as large as
    the model, since the caching allocator has a pool for each stream. So the first pass, and gathers that belong to it,
    run on the stream that they are called on, whose pool serves the next forward.
    """

    def __init__(self, channels: Channels, device: torch.device, owner: object | None) -> None:
        super().__init__(channels)
        # Not as methods, which would be two more calls of Python's for every bucket: errors are those of the backend,
        # and a work makes the current stream wait.
        self.launch = methodcaller("launch", channels)  # type: ignore[assignment]
        self.wait = methodcaller("wait")  # type: ignore[assignment]
        self._device = device
        holds_nothing = backend_name(channels.group, device) in ("nccl", "fake")
        self._run = run_as_step if holds_nothing else run_without_saved_context
        self._streams = streams()
        self._owner = owner
        self._stream: Any | None = None
        self._event: Any = None
        self._caller: Any = None
        """The stream that a job was submitted on, while it runs."""

    def for_pass(self, step: int) -> Executor:
        if step != 0:
            return self
        on_current = StreamExecutor(self.channels, self._device, None)
        on_current.observer = self.observer
        return on_current

    def new_future(self) -> BucketFuture:
        return future_for(self._device)

    def submit(self, job: _Job) -> None:
        if self._owner is None:
            self._run(job, self._device.type)
            return
        if self._stream is None:
            self._stream = stream_of(self._owner, self._device, priority=_PRIORITY)
            self._event = new_event(self._device)
        # The gradients of the bucket that has arrived were computed on the current stream, and the stages read them on
        # the side stream. One event serves all buckets, since a wait is for the record that it follows on the host, and
        # one is recorded again only behind that; ``wait_stream`` would make an event for each.
        streams = self._streams
        caller = self._caller = streams.current_stream(self._device)
        self._event.record(caller)
        self._stream.wait_event(self._event)
        streams.set_stream(self._stream)
        try:
            self._run(job, self._device.type)
        finally:
            self._caller = None
            streams.set_stream(caller)

    def join(self) -> None:
        # What the caller runs next reads or frees what the side stream has written. That runs in order, so a wait for
        # its last piece of work covers those of all buckets before.
        if self._stream is not None:
            self._event.record(self._stream)
            (self._caller or current_stream(self._device)).wait_event(self._event)

    def abandon(self, operation: Operation) -> None:
        # This is for the buffers alone: an operation that has failed is done with them.
        with contextlib.suppress(RuntimeError):
            operation.abandon(self.wait)


class Worker:
    """A thread that runs the submitted jobs in order, without recording gradients, until it is stopped.

    ``abandon`` closes connections where the script has ended but a job still waits for other ranks.
    """

    def __init__(self, name: str, *, abandon: _Job) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._has_jobs = False
        # The thread refers to this object, which must not keep the model alive.
        self._thread = start(self._run, name, stop=self.stop, abandon=abandon)

    def submit(self, job: _Job) -> None:
        """Run ``job`` after all that were submitted before."""
        self._jobs.put(job)
        self._has_jobs = True

    def wait_until_idle(self) -> None:
        """Block until the jobs submitted so far are done."""
        if self._has_jobs:
            is_idle = threading.Event()
            self.submit(is_idle.set)
            while not is_idle.wait(_LOOKING_S) and self._thread.is_alive():
                pass  # At the end of the script the thread ends first, and runs no later job.
            self._has_jobs = False

    def stop(self, last: _Job | None = None) -> None:
        """End the thread after the jobs submitted so far, and ``last``; returns at once."""
        if last is not None:
            self._jobs.put(last)
        self._jobs.put(None)

    @torch.no_grad()
    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # Otherwise it would keep a model's parameters alive until the next job.


def executor_for(group: dist.ProcessGroup, device: torch.device) -> Executor:
    """An executor whose collectives run on ``group`` itself, for one call on the calling thread; on an accelerator all
    calls on one group share a stream. Raises: UnsupportedError: a CUDA graph is being captured."""
    refuse_capture("an average or another call of several collectives", "call it outside of the capture", device)
    return StreamExecutor(Channels(group), device, group) if has_streams(device) else Executor(Channels(group))


def model_executor(
    stage: Stage, ddp: DistributedDataParallel | None, group: dist.ProcessGroup, device: torch.device, name: str
) -> Executor:
    """The executor of a model's ``stage``, whose thread, if it has one, is called ``name``; without ``ddp`` of a
    hook."""
    if has_streams(device):
        return StreamExecutor(channels := Channels(group), device, channels)
    channels = Channels(group, are_private=Channels.can_serve(group))
    is_inline = any(one.runs_inline for one in walk(stage)) or (ddp is not None and runs_inline(ddp))
    return Executor(channels, Worker(name, abandon=channels.abort) if channels.are_private and not is_inline else None)
