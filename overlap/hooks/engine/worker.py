"""The thread that runs stages of CPU tensors."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from overlap._threads import start
from overlap._torch.c10d import group_exists
from overlap.errors import CollectiveError

__all__ = ["Worker"]

# How often a thread without jobs looks whether its process group is still there.
_LOOKING_S = 0.5

_Job = Callable[[], None]


class Worker:
    """A thread that runs the submitted jobs in order, without recording gradients.

    It ends when it is told to, or when ``group`` has been destroyed.

    Args:
        name: the thread's name.
        abandon: makes a job fail that waits for other ranks, when the script has ended and it does not; and closes
            connections where ``group`` has been destroyed.
        group: the process group whose ranks its jobs talk to.
    """

    def __init__(self, name: str, *, abandon: _Job, group: dist.ProcessGroup | None = None) -> None:
        # The thread refers to the jobs alone, so that it does not keep the model alive.
        self._jobs = _Jobs()
        self._has_jobs = False
        run = partial(_run, self._jobs, _is_destroyed(group), abandon)
        start(run, name, stop=self._jobs.end, abandon=abandon)

    def submit(self, job: _Job) -> None:
        """Have ``job`` run. Raises: CollectiveError: the process group has been destroyed."""
        if not self._jobs.put(job):
            raise CollectiveError("the model's process group has been destroyed: wrap the model again with a new one")
        self._has_jobs = True

    def wait_until_idle(self) -> None:
        """Block until the jobs submitted so far are done."""
        if self._has_jobs:
            is_idle = threading.Event()
            if self._jobs.put(is_idle.set):
                is_idle.wait()
            self._has_jobs = False

    def stop(self, last: _Job | None = None) -> None:
        """End the thread after the jobs submitted so far, and ``last``; returns at once."""
        if last is not None:
            self._jobs.put(last)
        self._jobs.end()


class _Jobs:
    """What a thread still has to do, in order; ``None`` where it is to end."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, job: _Job | None) -> bool:
        """Whether somebody will take ``job``."""
        with self._lock:
            if not self._is_closed:
                self._queue.put(job)
            return not self._is_closed

    def end(self) -> None:
        """Have the thread end behind what it has to do."""
        self.put(None)

    def take(self) -> _Job | None:
        """The next one. Raises: queue.Empty: none has come for a while."""
        return self._queue.get(timeout=_LOOKING_S)

    def close(self) -> bool:
        """Take none any more, unless one has just come; whether it is closed."""
        with self._lock:
            self._is_closed = self._queue.empty()
            return self._is_closed


def _is_destroyed(group: dist.ProcessGroup | None) -> Callable[[], bool]:
    """Says whether ``group`` has been destroyed since; never of one that ``torch.distributed`` does not know."""
    if group is None or not group_exists(group):
        return lambda: False
    return lambda: not group_exists(group)


@torch.no_grad()
def _run(jobs: _Jobs, is_destroyed: Callable[[], bool], abandon: _Job) -> None:
    while True:
        try:
            job = jobs.take()
        except queue.Empty:
            if is_destroyed() and jobs.close():
                abandon()
                return
            continue
        if job is None:
            return
        job()
        del job  # Otherwise it would keep a model's parameters alive until the next job.
