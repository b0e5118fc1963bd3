"""The thread that runs stages of CPU tensors."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial

import torch

from overlap._threads import start

__all__ = ["Worker"]


class Worker:
    """A thread that runs the submitted jobs in order, without recording gradients.

    Args:
        name: the thread's name.
        abandon: makes a job fail that waits for other ranks, when the script has ended and it does not.
    """

    def __init__(self, name: str, *, abandon: Callable[[], None]) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._has_jobs = False
        # It refers to the queue alone, so that it does not keep the model alive.
        jobs = self._jobs
        start(partial(_run, jobs), name, stop=partial(jobs.put, None), abandon=abandon)

    def submit(self, job: Callable[[], None]) -> None:
        self._has_jobs = True
        self._jobs.put(job)

    def wait_until_idle(self) -> None:
        """Block until the jobs submitted so far are done."""
        if self._has_jobs:
            is_idle = threading.Event()
            self._jobs.put(is_idle.set)
            is_idle.wait()
            self._has_jobs = False

    def stop(self) -> None:
        """End the thread after the jobs submitted so far; returns at once."""
        self._jobs.put(None)


@torch.no_grad()
def _run(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # Otherwise it would keep a model's parameters alive until the next job.
