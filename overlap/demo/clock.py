"""Step times that cost the step nothing: no collective, and on a GPU no wait for it."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import Any

import torch

__all__ = ["StepClock"]


class StepClock:
    """Takes the time from the start of a step to the start of the next.

    That counts what an overlapped step leaves running when its call returns. On a GPU the marks are events, read
    when all is over.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        # A row per epoch; a mark is a torch.cuda.Event or has its `elapsed_time`.
        self._epochs: list[list[Any]] = []

    def start_epoch(self) -> None:
        """Begins a row of steps; the time between two rows is not counted."""
        self._epochs.append([])

    def mark(self) -> None:
        """The start of a step, and once more after the last."""
        self._epochs[-1].append(_event() if self._on_gpu else _HostMark())

    def median_ms(self) -> float:
        """The median step, waiting for the GPU if there is one."""
        if self._on_gpu:
            torch.cuda.synchronize()
        steps = [before.elapsed_time(after) for marks in self._epochs for before, after in pairwise(marks)]
        return float(statistics.median(steps))


class _HostMark:
    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def elapsed_time(self, later: _HostMark) -> float:
        return (later._at_s - self._at_s) * 1e3


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
