"""Which candidates meet in a race, on a clock that is moved by the steps alone."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
import torch

from overlap.errors import ConfigurationError
from overlap.plan.candidates import PLAIN as PLAIN_METHOD
from overlap.plan.candidates import Candidate
from overlap.plan.decision import Evidence
from overlap.plan.race import Lane, Race
from overlap.plan.tournament import tournament

PLAIN, STEP, ZERO = Candidate(PLAIN_METHOD), Candidate("step"), Candidate("zero", 8.0)
STEP_8, STEP_50, ZERO_2 = Candidate("step", 8.0), Candidate("step", 50.0), Candidate("zero", 2.0)
FORWARD = Candidate("zero-forward")


class _OneRank:
    def agree(self, value: Any) -> list[Any]:
        return [value]

    def from_rank_0(self, value: Any) -> Any:
        return value


class _Stepped(Race):
    """Steps of what ``true_ms`` says, with noise; each sample takes ``besides_ms`` more by the race's clock."""

    def __init__(
        self,
        true_ms: dict[Candidate, float],
        refuses: tuple[Candidate, ...] = (),
        *,
        besides_ms: float = 0.0,
        noise: float = 0.01,
        seed: int = 0,
    ) -> None:
        super().__init__(cast(Any, _OneRank()), cast(Any, None), torch.device("cpu"), (), cast(Any, None), {})
        self.true_ms, self.refuses, self.besides_ms = true_ms, refuses, besides_ms
        self.spent_s, self.most_at_once = 0.0, 0
        self.tried: list[Candidate] = []
        self._noise, self._draw = noise, random.Random(seed)

    def add(self, candidate: Candidate) -> bool:
        if candidate in self.refuses:
            self.refused[candidate] = "sparse"
            return False
        lane = cast(Any, _Nothing(candidate))
        self.steps_ms[candidate] = self._sample_ms(lane, steps=1, lead_in=1)
        self._lanes[candidate] = lane
        self.tried.append(candidate)
        self.most_at_once = max(self.most_at_once, len(self._lanes))
        return True

    def _sample_ms(self, lane: Lane, *, steps: int, lead_in: int) -> float:
        ms = self.true_ms[lane.candidate] * self._draw.lognormvariate(0, self._noise)
        self.spent_s += 1e-3 * (ms * (steps + lead_in) + self.besides_ms)
        return ms


class _Nothing:
    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate

    def close(self) -> None:
        pass


def _raced(race: _Stepped, predicted: list[Candidate], *, seconds: float) -> Candidate:
    # All are predicted alike, in this order.
    predicted_ms = dict.fromkeys(predicted, race.true_ms[PLAIN])
    tournament(race, PLAIN, predicted_ms, left_s=lambda: seconds - race.spent_s)
    assert race.most_at_once <= 3
    assert race.spent_s <= 1.1 * seconds
    return Evidence(race.samples, predicted_ms).best(race.samples)


def test_a_method_that_is_predicted_last_is_tried_and_then_its_other_sizes() -> None:
    race = _Stepped({PLAIN: 100, STEP: 99, STEP_8: 97, STEP_50: 98, ZERO: 80, ZERO_2: 70})
    assert _raced(race, [PLAIN, STEP, STEP_8, STEP_50, ZERO, ZERO_2], seconds=20) == ZERO_2
    assert race.tried == [PLAIN, STEP, ZERO, ZERO_2]


def test_of_a_method_that_refuses_the_model_no_other_size_is_tried() -> None:
    race = _Stepped({PLAIN: 100, STEP: 50, STEP_8: 50, ZERO: 80}, refuses=(STEP,))
    assert _raced(race, [PLAIN, STEP, STEP_8, ZERO], seconds=20) == ZERO
    assert race.tried == [PLAIN, ZERO]


@pytest.mark.parametrize(
    ("step_ms", "tried"),
    [
        (5.0, [PLAIN, STEP, ZERO, FORWARD]),
        (300.0, [PLAIN, STEP, ZERO]),
        (700.0, [PLAIN, STEP]),
        (3000.0, []),
    ],
)
def test_the_time_that_is_left_decides_how_many_are_tried(step_ms: float, tried: list[Candidate]) -> None:
    names = [PLAIN, STEP, ZERO, FORWARD]
    race = _Stepped({name: (0.8 if name is FORWARD else 1.0) * step_ms for name in names})
    found = _raced(race, names, seconds=9.0)
    assert race.tried == [name for name in names if name in tried]
    assert found == (FORWARD if FORWARD in tried else PLAIN)


def test_what_is_left_of_the_time_goes_to_plain_ddp_and_the_winner() -> None:
    race = _Stepped({PLAIN: 20.0, STEP: 19.0})
    _raced(race, [PLAIN, STEP], seconds=9.0)
    assert race.spent_s > 8.5
    assert len(race.samples[STEP]) > 40


def test_where_there_is_time_the_better_one_of_two_that_are_close_is_found() -> None:
    true_ms = {PLAIN: 30.0, STEP: 27.0, STEP_8: 26.0, STEP_50: 27.0}
    found = [
        _raced(_Stepped(true_ms, noise=0.05, seed=seed), [PLAIN, STEP, STEP_8, STEP_50], seconds=12.0)
        for seed in range(100)
    ]
    assert found.count(STEP_8) >= 84


def test_rounds_that_take_longer_than_their_steps_do_not_take_longer_than_there_is_time() -> None:
    race = _Stepped({PLAIN: 20.0, STEP: 19.0}, besides_ms=60.0)
    _raced(race, [PLAIN, STEP], seconds=9.0)
    assert race.spent_s > 8.0


def test_without_a_rival_nothing_runs() -> None:
    race = _Stepped({PLAIN: 100.0})
    assert _raced(race, [PLAIN], seconds=9.0) == PLAIN
    assert race.samples == {} and race.tried == []


def test_a_model_that_plain_ddp_refuses_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="plain DDP refuses this model: sparse"):
        _raced(_Stepped({PLAIN: 100.0, STEP: 90.0}, refuses=(PLAIN,)), [PLAIN, STEP], seconds=9.0)


class _Deferring:
    """On a clock of its own, a step waits for what the last one sent, computes for 10 ms, and sends for 50 ms."""

    candidate = FORWARD

    def __init__(self) -> None:
        self.now_s = self.arrives_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def meet(self, *args: Any, **keywords: Any) -> None:
        self.now_s += 0.03

    def step(self, sample: Any) -> None:
        self.finish()
        self.now_s += 0.01
        self.arrives_s = self.now_s + 0.05

    def finish(self) -> None:
        self.now_s = max(self.now_s, self.arrives_s)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_sample_holds_as_many_gathers_as_steps(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lane = _Deferring()
    monkeypatch.setattr("overlap.plan.race.time", lane)
    monkeypatch.setattr("overlap.plan.race.all_reduce", lane.meet)
    race = Race(cast(Any, _OneRank()), cast(Any, None), torch.device("cpu"), (), cast(Any, None), {})
    assert race._sample_ms(cast(Any, lane), steps=steps, lead_in=1) == pytest.approx(60)
    assert lane.now_s == lane.arrives_s
