"""The thread that runs stages of CPU tensors."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

__all__ = ["Worker"]


class Worker:
    """A thread that runs the submitted jobs in order, without recording gradients."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon that refers to the queue alone, so that it keeps neither the interpreter nor the model alive.
        threading.Thread(target=_run, args=(self._jobs,), name=name, daemon=True).start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """End the thread after the jobs submitted so far; returns at once."""
        self._jobs.put(None)


@torch.no_grad()
def _run(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # Otherwise it would keep a model's parameters alive until the next job.
