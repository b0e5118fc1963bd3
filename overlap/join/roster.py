"""Which ranks still have inputs, in each iteration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from overlap.errors import TrainingLoopError

__all__ = ["Known", "Polled", "Roster"]


class Roster(ABC):
    """How many samples each rank has in the present iteration: 0 where it has none, 1 where samples are not counted."""

    def __init__(self, size: int) -> None:
        self._last_present = [1] * size

    @property
    @abstractmethod
    def present(self) -> Sequence[int]:
        """The samples of every rank, in ranks' order; may wait for them."""

    @property
    def count(self) -> int:
        """The number of ranks that have inputs."""
        return sum(1 for samples in self.present if samples)

    @property
    def missing(self) -> list[int]:
        """The ranks that have none."""
        return [rank for rank, samples in enumerate(self.present) if not samples]

    @property
    def authority(self) -> int:
        """The highest rank that has inputs, or was among the last to have some: the others take over its buffers."""
        if any(present := self.present):
            self._last_present = list(present)
        return max(rank for rank, samples in enumerate(self._last_present) if samples)


class Known(Roster):
    """Every rank said at entry how many iterations it will run: nothing is asked any more."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(len(lengths))
        self.lengths = lengths
        self.iteration = -1

    @property
    def present(self) -> list[int]:
        # Before the first iteration and after the last, those of the first and of the last.
        at = min(max(self.iteration, 0), max(0, max(self.lengths) - 1))
        return [1 if length > at else 0 for length in self.lengths]

    @property
    def is_even(self) -> bool:
        """Whether no rank runs out before another."""
        return min(self.lengths) == max(self.lengths)

    @property
    def writer(self) -> int:
        """The rank that stays to the end; the highest of several."""
        return max(rank for rank, length in enumerate(self.lengths) if length == max(self.lengths))


class Polled(Roster):
    """One small all-reduce an iteration on ``group``: each rank says whether it has inputs.

    With ``ahead`` it says so of the next iteration, so that the answer has come when it is needed. Without, it tells
    how far it has come, counted from 1, and the negative of that when it has just run out: all must have come equally
    far.

    Raises:
        TrainingLoopError: they have not, where the answer is asked for.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, ahead: bool) -> None:
        super().__init__(group.size())
        self._group, self._device, self._ahead = group, device, ahead
        self._pending: _Poll | None = None
        self._present = [1] * group.size()

    def begin(self) -> None:
        """The iteration that was told of ahead begins."""
        self._settle()

    def tell(self, number: int) -> None:
        """Tell the samples of the next iteration, or where nothing is told ahead the place of this one."""
        self._settle()
        self._pending = _Poll(self._group, self._device, number)

    @property
    def present(self) -> list[int]:
        if not self._ahead:
            self._settle()
        return self._present

    def _settle(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            numbers = pending.result()
            self._present = numbers if self._ahead else _presence(numbers)
            if any(self._present):
                self._last_present = self._present


def _presence(places: Sequence[int]) -> list[int]:
    """Which ranks have inputs."""
    if len({abs(place) for place in places if place}) > 1:
        left = [rank for rank, place in enumerate(places) if place < 0]
        raise TrainingLoopError(
            f"ranks {left} ran out of inputs, and the others did something more (a step of an optimizer or a "
            "scheduler) before the forward that tells them so; do it after backward, or use "
            "`for batch in join.iterate(loader)`"
        )
    return [1 if place > 0 else 0 for place in places]


class _Poll:
    """One all-reduce of as many numbers as there are ranks, under way."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, number: int) -> None:
        self._numbers = torch.zeros(group.size(), dtype=torch.int64)
        self._numbers[group.rank()] = number
        self._on_device = self._numbers.to(device)
        work = dist.all_reduce(self._on_device, group=group, async_op=True)
        assert work is not None
        self._work = work
        self._copied: Any = None
        if device.type != "cpu":
            self._copy(torch.get_device_module(device), device)

    def _copy(self, module: Any, device: torch.device) -> None:
        """Bring the result to the host behind the all-reduce alone: the host must not wait for a backward."""
        stream = module.Stream(device=device)
        with module.stream(stream):
            self._work.wait()
            self._numbers = self._on_device.to("cpu", non_blocking=True)
            self._copied = stream.record_event()

    def result(self) -> list[int]:
        if self._copied is not None:
            self._copied.synchronize()
            return [int(number) for number in self._numbers.tolist()]
        self._work.wait()
        return [int(number) for number in self._on_device.tolist()]
