"""Step times that cost the step nothing: no collective, and on a GPU no wait for it."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import torch

from overlap.timeline.clock import Clock, clock_for

__all__ = ["StepClock"]


class StepClock:
    """Takes the time from the start of a step to the start of the next.

    That counts what an overlapped step leaves running when its call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._epochs: list[tuple[Clock, list[Any]]] = []

    def start_epoch(self) -> None:
        """Begins a row of steps; the time between two rows is not counted."""
        self._epochs.append((clock_for(self._device), []))

    def mark(self) -> None:
        """The start of a step, and once more after the last."""
        clock, marks = self._epochs[-1]
        marks.append(clock.now())

    def median_ms(self) -> float:
        """The median step, waiting for the GPU if there is one."""
        steps_ms: list[float] = []
        for clock, marks in self._epochs:
            clock.settle()
            steps_ms += [clock.elapsed_ms(before, after) for before, after in pairwise(marks)]
        return statistics.median(steps_ms)
