"""The best candidates timed against plain DDP, on copies, taking turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap._torch.device import has_streams, synchronize
from overlap.errors import ConfigurationError, OverlapError
from overlap.hooks.engine.registration import registration_of
from overlap.join.group_collectives import all_reduce
from overlap.plan.candidates import METHODS, Candidate, build, wrap
from overlap.plan.compute import forward_and_loss, fresh
from overlap.plan.copies import Training
from overlap.plan.decision import FEWEST_ROUNDS
from overlap.plan.meeting import Meeting

__all__ = ["Lane", "Race", "rounds_that_fit"]

# DDP rebuilds its buckets after the first step, and the second may allocate.
_WARMUP_STEPS = 2
_MOST_ROUNDS = 30
# A sample is at least this long, so that what the clock and the scheduler add is small.
_SAMPLE_MS = 40.0


@dataclass(frozen=True)
class Lane:
    """A candidate that is built and ready to run."""

    candidate: Candidate
    ddp: DistributedDataParallel
    optimizer: Optimizer
    training: Training

    def step(self, sample: Sequence[Any]) -> None:
        self.optimizer.zero_grad()
        forward_and_loss(self.ddp, self.training, sample).backward()
        self.optimizer.step()

    @property
    def lead_in_steps(self) -> int:
        """Untimed steps before a sample: what is left to the next forward must be there."""
        return 1 if METHODS[self.candidate.method].update == "sharded, gathered in forward" else 0

    def finish(self) -> None:
        """Wait for what is in flight."""
        if hasattr(self.optimizer, "wait"):
            self.optimizer.wait()

    def close(self) -> None:
        self.finish()
        if (registration := registration_of(self.ddp)) is not None:
            registration.remove()


class Race:
    """Candidates on ``group``, whose ranks all call the same."""

    def __init__(
        self,
        meeting: Meeting,
        group: dist.ProcessGroup,
        device: torch.device,
        sample: Sequence[Any],
        copied: Callable[[], Training],
        ddp_options: Mapping[str, Any],
    ) -> None:
        self._meeting, self._group, self._device = meeting, group, device
        self._sample, self._copied, self._ddp_options = sample, copied, ddp_options
        self.lanes: list[Lane] = []
        self.refused: dict[Candidate, str] = {}
        """What could not be built or did not take a step, and why."""

    def add(self, candidate: Candidate) -> bool:
        """Build ``candidate`` on a copy; whether all ranks could."""
        training = self._copied()
        words = None
        try:
            ddp = wrap(training.model, candidate, group=self._group, ddp_options=self._ddp_options, init_sync=False)
            optimizer = build(ddp, training.optimizer, candidate)
        except ConfigurationError as error:
            words = str(error)
        said = next((one for one in self._meeting.exchange(words) if one is not None), None)
        if said is not None:
            self.refused[candidate] = said
            return False
        self.lanes.append(Lane(candidate, ddp, optimizer, training))
        return True

    def run(self, *, seconds: float) -> dict[Candidate, list[float]]:
        """The samples of each candidate, in ms a step of the slowest rank, round by round."""
        agreed_ms = self._meeting.from_first(self._warm_up())
        steps = [max(1, math.ceil(_SAMPLE_MS / ms)) for ms in agreed_ms]
        round_ms = sum(
            ms * (count + lane.lead_in_steps) for ms, count, lane in zip(agreed_ms, steps, self.lanes, strict=True)
        )
        rounds = max(FEWEST_ROUNDS, min(_MOST_ROUNDS, int(1e3 * seconds / round_ms)))
        own: list[list[float]] = [[] for _ in self.lanes]
        for number in range(rounds):
            # In reverse order every other time, so that no lane always runs after the same one.
            places = list(range(len(self.lanes)))
            for place in places if number % 2 == 0 else reversed(places):
                lane = self.lanes[place]
                own[place].append(self._sample_ms(lane, steps=steps[place], lead_in=lane.lead_in_steps))
        of_ranks = self._meeting.exchange(own)
        return {
            lane.candidate: [max(times) for times in zip(*(of_rank[place] for of_rank in of_ranks), strict=True)]
            for place, lane in enumerate(self.lanes)
        }

    def _warm_up(self) -> list[float]:
        """Ms a step of each lane, but of those that refuse the model only now, which leave the race on all ranks."""
        warm_ms = []
        for lane in list(self.lanes):
            ms, words = 0.0, None
            try:
                ms = self._sample_ms(lane, steps=1, lead_in=_WARMUP_STEPS - 1)
            except ConfigurationError as error:
                if lane.candidate.is_plain:
                    raise
                words = str(error)
            said = next((one for one in self._meeting.exchange(words) if one is not None), None)
            if said is None:
                warm_ms.append(ms)
                continue
            self.refused[lane.candidate] = said
            self.lanes.remove(lane)
            # Its last backward may still be in flight, and raise the same error again.
            with suppress(OverlapError):
                lane.close()
        return warm_ms

    def close(self) -> None:
        """Take down what was built, on every rank."""
        for lane in self.lanes:
            lane.close()
        self.lanes.clear()

    def _sample_ms(self, lane: Lane, *, steps: int, lead_in: int) -> float:
        for _ in range(lead_in):
            lane.step(fresh(self._sample))
        batches = [fresh(self._sample) for _ in range(steps)]
        # Ranks begin together.
        all_reduce(torch.zeros(1, device=self._device), group=self._group)
        self._settle()
        start_s = time.perf_counter()
        for batch in batches:
            lane.step(batch)
        self._settle()
        ms = 1e3 * (time.perf_counter() - start_s) / steps
        lane.finish()
        return ms

    def _settle(self) -> None:
        if has_streams(self._device):
            synchronize(self._device)


def rounds_that_fit(steps_ms: Sequence[float], seconds: float) -> int:
    """How many rounds of candidates with these predicted steps fit into the time, behind the warm-up."""
    return int(1e3 * seconds / sum(steps_ms)) - _WARMUP_STEPS
