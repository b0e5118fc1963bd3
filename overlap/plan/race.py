"""Candidates timed against plain DDP, on copies, taking turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap._torch.device import current_stream, has_streams
from overlap.errors import ConfigurationError, OverlapError
from overlap.hooks.engine.registration import registration_of
from overlap.join.board import Agreement
from overlap.join.group_collectives import all_reduce
from overlap.plan.candidates import METHODS, Candidate, build, wrap
from overlap.plan.compute import forward_and_loss, fresh
from overlap.plan.copies import Training
from overlap.plan.decision import FEWEST_ROUNDS

__all__ = ["Lane", "Race", "round_ms", "warm_up_ms"]

# DDP rebuilds its buckets after the first step, and the second may allocate. Where steps are long that is a small part.
_WARMUP_STEPS, _LONG_MS = 2, 500.0
# After so many, noise of a fifth is one of 2 % of the mean: as little as a candidate must be faster by.
_MOST_ROUNDS = 100
# Before the time that is left is looked at again: a round takes longer than its steps.
_ROUNDS_AT_ONCE = 10
# A sample is at least this long, so that what the clock and the scheduler add is small.
_SAMPLE_MS = 80.0


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
        agreement: Agreement,
        group: dist.ProcessGroup,
        device: torch.device,
        sample: Sequence[Any],
        copied: Callable[[], Training],
        ddp_options: Mapping[str, Any],
    ) -> None:
        self._agreement, self._group, self._device = agreement, group, device
        self._sample, self._copied, self._ddp_options = sample, copied, ddp_options
        self._lanes: dict[Candidate, Lane] = {}
        self.steps_ms: dict[Candidate, float] = {}
        """Of each lane, about how long a step takes; the same on all ranks."""
        self.samples: dict[Candidate, list[float | None]] = {}
        """Of each that has ever run, ms a step of the slowest rank in each round; None where it was not in the race."""
        self.refused: dict[Candidate, str] = {}
        """What could not be built or did not take a step, and why."""

    def add(self, candidate: Candidate) -> bool:
        """Build ``candidate`` on a copy, and take its first steps; whether all ranks could."""
        training = self._copied()
        words = None
        try:
            ddp = wrap(training.model, candidate, group=self._group, ddp_options=self._ddp_options, init_sync=False)
            optimizer = build(ddp, training.optimizer, candidate)
        except ConfigurationError as error:
            words = str(error)
        if self._is_refused(candidate, words):
            return False
        lane = Lane(candidate, ddp, optimizer, training)
        for _ in range(_WARMUP_STEPS):
            ms, words = self._tried(lane)
            if self._is_refused(candidate, words):
                # Its last backward may still be in flight, and raise the same error again.
                with suppress(OverlapError):
                    lane.close()
                return False
            self.steps_ms[candidate] = self._agreement.from_rank_0(ms)
            if self.steps_ms[candidate] > _LONG_MS:
                break
        self._lanes[candidate] = lane
        return True

    def _tried(self, lane: Lane) -> tuple[float, str | None]:
        try:
            return self._sample_ms(lane, steps=1, lead_in=0), None
        except ConfigurationError as error:
            if lane.candidate.is_plain:
                raise
            return 0.0, str(error)

    def _is_refused(self, candidate: Candidate, words: str | None) -> bool:
        said = next((one for one in self._agreement.agree(words) if one is not None), None)
        if said is not None:
            self.refused[candidate] = said
        return said is not None

    @property
    def _done(self) -> int:
        return max(map(len, self.samples.values()), default=0)

    def run(self, rounds: int) -> None:
        """So many rounds, in which each lane is timed once; adds to :attr:`samples`."""
        before = self._done
        lanes = list(self._lanes.values())
        own: list[list[float]] = [[] for _ in lanes]
        for number in range(before, before + rounds):
            # In reverse order every other time, so that no lane always runs after the same one.
            places = list(range(len(lanes)))
            for place in places if number % 2 == 0 else reversed(places):
                candidate = lanes[place].candidate
                steps = _steps(self.steps_ms[candidate])
                own[place].append(self._sample_ms(lanes[place], steps=steps, lead_in=_lead_in(candidate)))
        of_ranks = self._agreement.agree(own)
        for place, lane in enumerate(lanes):
            found = [max(one) for one in zip(*(of_rank[place] for of_rank in of_ranks), strict=True)]
            self.samples.setdefault(lane.candidate, [None] * before).extend(found)
            self.steps_ms[lane.candidate] = statistics.median(found)
        for candidate in self.samples.keys() - self._lanes.keys():
            self.samples[candidate] += [None] * rounds

    def run_for(self, left_s: Callable[[], float]) -> None:
        """As many rounds as fit into the time that is left and are of use; none if too few fit to compare at all."""
        while (done := self._done) < _MOST_ROUNDS:
            per_round_ms = sum(round_ms(name, self.steps_ms[name]) for name in self._lanes)
            rounds = min(int(1e3 * left_s() / per_round_ms), _MOST_ROUNDS - done, _ROUNDS_AT_ONCE)
            if rounds <= 0 or done + rounds < FEWEST_ROUNDS:
                break
            self.run(rounds)

    def drop(self, candidate: Candidate) -> None:
        """Take down one lane, on every rank."""
        self._lanes.pop(candidate).close()

    def close(self) -> None:
        """Take down what was built, on every rank."""
        for candidate in list(self._lanes):
            self.drop(candidate)

    def _sample_ms(self, lane: Lane, *, steps: int, lead_in: int) -> float:
        lead_in_batches = [fresh(self._sample) for _ in range(lead_in)]
        batches = [fresh(self._sample) for _ in range(steps)]
        # Ranks begin together. They meet before the lead-in: meanwhile what it leaves to the next forward would arrive,
        # and the clock would see it neither here nor behind the last step.
        all_reduce(torch.zeros(1, device=self._device), group=self._group)
        for batch in lead_in_batches:
            lane.step(batch)
        self._settle()
        start_s = time.perf_counter()
        for batch in batches:
            lane.step(batch)
        self._settle()
        ms = 1e3 * (time.perf_counter() - start_s) / steps
        lane.finish()
        return ms

    def _settle(self) -> None:
        # Not what is on other streams: it is left to the next forward, as on the CPU.
        if has_streams(self._device):
            current_stream(self._device).synchronize()


def warm_up_ms(step_ms: float) -> float:
    """What the first steps of a lane take, before it is timed."""
    return step_ms if step_ms > _LONG_MS else _WARMUP_STEPS * step_ms


def round_ms(candidate: Candidate, step_ms: float) -> float:
    """What a round takes of ``candidate``, a step of which takes ``step_ms``."""
    return step_ms * (_steps(step_ms) + _lead_in(candidate))


def _steps(step_ms: float) -> int:
    return max(1, math.ceil(_SAMPLE_MS / step_ms))


def _lead_in(candidate: Candidate) -> int:
    """Untimed steps before a sample: what they leave to the next forward takes the place of what a sample leaves."""
    return 1 if METHODS[candidate.method].update == "sharded, gathered in forward" else 0
