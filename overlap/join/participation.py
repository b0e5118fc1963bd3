"""Which ranks still have inputs, in each iteration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from overlap._torch.device import has_streams, on_stream, recorded_event, stream_of, to_host
from overlap.errors import TrainingLoopError

__all__ = ["KnownParticipation", "Participation", "PolledParticipation"]


# How long to wait for an all-reduce before looking whether another rank has failed.
_PATIENCE = timedelta(seconds=1)


class Participation(ABC):
    """How many samples each rank has in the present iteration: 0 without inputs, 1 where samples are not counted."""

    def __init__(self, size: int) -> None:
        self._last_samples = [1] * size

    @property
    @abstractmethod
    def samples(self) -> Sequence[int]:
        """The samples of every rank, in the order of ranks; may wait for them."""

    @property
    def count(self) -> int:
        """The number of ranks that have inputs."""
        return sum(1 for number in self.samples if number)

    @property
    def missing(self) -> list[int]:
        """The ranks that have no inputs."""
        return [rank for rank, number in enumerate(self.samples) if not number]

    @property
    def buffer_source(self) -> int:
        """The rank whose buffers the others take over: the highest of those that have inputs, or had them last."""
        samples = self.samples
        return max(rank for rank, number in enumerate(samples if any(samples) else self._last_samples) if number)


class KnownParticipation(Participation):
    """Every rank said in advance how many iterations it will run, so no collective is needed."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(len(lengths))
        self.lengths = lengths
        self.iteration = -1

    @property
    def samples(self) -> list[int]:
        # Before the first iteration as in the first, after the last as in the last.
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


class PolledParticipation(Participation):
    """One all-reduce per iteration on ``group``, of as many int64 as there are ranks: each says whether it has inputs.

    With ``ahead`` the ranks announce the samples of the next iteration, so that the result is there when it is needed.
    Without, they announce how many events they have counted, and the negative of it when they have just run out: the
    numbers must be equal.

    Args:
        group: the ranks.
        device: that of the all-reduce.
        ahead: see above.
        look: raises where another rank has failed, which will not take part.

    Raises:
        TrainingLoopError: they are not, where the result is asked for.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, ahead: bool, look: Callable[[], None]
    ) -> None:
        super().__init__(group.size())
        self._look = look
        self.is_ahead = ahead
        self._group, self._device = group, device
        self._pending: _Poll | None = None
        self._samples = [1] * group.size()

    def announce(self, number: int) -> None:
        """Issue the all-reduce, with the samples of the next iteration, or with the count of events of this one."""
        self.settle()
        self._pending = _Poll(self._group, self._device, number)

    @property
    def samples(self) -> list[int]:
        if not self.is_ahead:
            self.settle()
        return self._samples

    def settle(self) -> None:
        """Wait for what was announced: it holds from here on."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            numbers = pending.result(self._look)
            self._samples = numbers if self.is_ahead else _present(numbers)
            if any(self._samples):
                self._last_samples = self._samples


def _present(counts: Sequence[int]) -> list[int]:
    """1 for each rank that has inputs, 0 for each other."""
    if len({abs(count) for count in counts if count}) > 1:
        left = [rank for rank, count in enumerate(counts) if count < 0]
        raise TrainingLoopError(
            f"ranks {left} ran out of inputs, and the others did something more (a step of an optimizer or a "
            "scheduler) before the forward that would tell them; do it after backward, or use "
            "`for batch in join.iterate(loader)`"
        )
    return [1 if count > 0 else 0 for count in counts]


class _Poll:
    """An all-reduce under way, in which each rank fills in its own number.

    On an accelerator it has a stream of its own: the host, which waits for the result, must not wait for a backward.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, number: int) -> None:
        self._copied: Any = None
        with on_stream(stream_of(group, device, "polls")) if has_streams(device) else nullcontext():
            self._numbers = torch.zeros(group.size(), dtype=torch.int64, device=device)
            self._numbers[group.rank()].fill_(number)
            work = dist.all_reduce(self._numbers, group=group, async_op=True)
            assert work is not None
            self._work = work
            if has_streams(device):
                work.wait()
                self._numbers = to_host(self._numbers)
                self._copied = recorded_event(device)

    def result(self, look: Callable[[], None]) -> list[int]:
        """The numbers of all ranks; calls ``look`` now and then while the host waits for them."""
        if self._copied is not None:
            self._copied.synchronize()
        else:
            self._wait(look)
        return [int(number) for number in self._numbers.tolist()]

    def _wait(self, look: Callable[[], None]) -> None:
        while True:
            is_over = self._work.is_completed()  # Asked before: it may be done a moment after the patience has ended.
            try:
                if is_over:
                    self._work.wait()
                else:
                    self._work.wait(_PATIENCE)
                return
            except RuntimeError:
                look()
                if is_over:
                    raise
