"""The race and its decision, on a clock that only the steps move: which candidates meet, and which one is chosen."""

import io
import random
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn
from tqdm import tqdm

from overlap import ConfigurationError, Plan
from overlap.plan import race as race_module
from overlap.plan.candidates import METHODS, PLAIN, allowed, obstacle
from overlap.plan.choice import Row, decide, is_surely_faster, quartiles
from overlap.plan.race import FEWEST_ROUNDS, Like, Race

STEP, ZERO, FORWARD, BF16 = "step", "zero", "zero-forward", "bf16"
ADD_MS = 5.0


class _OneRank:
    rank, size = 0, 1

    def agree(self, value: Any = None, decide: Any = lambda values: None) -> Any:
        return decide([value])


class _Lane:
    def __init__(self, candidate: str, step_ms: float) -> None:
        self.candidate, self.step_ms = candidate, step_ms


class _Race(Race):
    """Steps of these lengths, with noise."""

    def __init__(self, true_ms: dict[str, float], *, refused: Sequence[str] = (), noise: float = 0.01):
        self.true_ms, self.refuses, self.noise, self.draw = true_ms, refused, noise, random.Random(0)
        self.now_s = 0.0
        self.heats: list[str] = []
        one, none = cast(Any, _OneRank()), cast(Any, None)
        self.shown = io.StringIO()
        progress = tqdm(total=60, file=self.shown, bar_format="{desc}")
        super().__init__(one, none, none, (), ddp_options={}, like=Like(), progress=progress)

    def _add(self, candidate: str) -> Any:
        self.now_s += 1e-3 * ADD_MS
        if candidate in self.refuses:
            self.refused[candidate] = "sparse"
            self._lanes.clear()
            return None
        self.heats.append(candidate)
        lane = self._lanes[candidate] = cast(Any, _Lane(candidate, self.true_ms[candidate]))
        assert len(self._lanes) <= 2, "more than two copies"
        return lane

    def _sample_ms(self, lane: Any) -> float:
        ms = self.true_ms[lane.candidate] * self.draw.lognormvariate(0, self.noise)
        self.now_s += 1e-3 * ms
        return ms

    def _drop(self, candidate: str) -> None:
        del self._lanes[candidate]


def _run(race: _Race, entrants: Sequence[str], seconds: float, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(race_module.time, "monotonic", lambda: race.now_s)
    return race.run(entrants, end_s=seconds)


def test_the_fastest_has_the_second_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    race = _Race({PLAIN: 100, STEP: 99, ZERO: 70, FORWARD: 95, BF16: 80})
    assert _run(race, [STEP, ZERO, FORWARD, BF16], 60.0, monkeypatch) == ZERO
    assert race.heats == [PLAIN, STEP, ZERO, FORWARD, BF16, ZERO]
    assert len(race.ratios[ZERO]) > 3 * len(race.ratios[BF16]) and len(race.ratios[BF16]) >= len(race.ratios[STEP])
    assert 55 < race.now_s < 63
    assert is_surely_faster(race.ratios[ZERO])


def test_the_time_decides_how_many_race(monkeypatch: pytest.MonkeyPatch) -> None:
    for step_ms, seconds, raced in ((100, 60.0, 3), (500, 8.0, 2), (500, 6.0, 1), (3000, 9.0, 0)):
        race = _Race(dict.fromkeys([PLAIN, STEP, ZERO, FORWARD], step_ms))
        last = _run(race, [STEP, ZERO, FORWARD], seconds, monkeypatch)
        assert len(race.ratios) == raced, (step_ms, seconds)
        assert race.now_s < 1.2 * seconds
        assert race.is_complete == (raced == 3) and (last is not None) == (raced > 0)
        assert last is None or len(race.ratios[last]) >= FEWEST_ROUNDS


def test_after_a_method_that_is_refused_plain_ddp_is_built_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    race = _Race({PLAIN: 100, STEP: 1, ZERO: 80}, refused=[STEP], noise=0.0)
    assert _run(race, [STEP, ZERO], 30.0, monkeypatch) == ZERO
    assert race.heats == [PLAIN, PLAIN, ZERO, ZERO]
    assert race.refused == {STEP: "sparse"}
    for candidate in (PLAIN, STEP, ZERO):
        assert f"races {candidate}" in race.shown.getvalue()
    assert _run(_Race({PLAIN: 100}, refused=[STEP]), [STEP], 30.0, monkeypatch) is None
    with pytest.raises(ConfigurationError, match="ddp does not take this model: sparse"):
        _run(_Race({PLAIN: 100}, refused=[PLAIN]), [STEP], 30.0, monkeypatch)


def test_in_doubt_plain_ddp_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower by 3 %, with noise of 5 %: hardly ever chosen. Faster by 15 %: nearly always."""
    chosen = {0.85: 0, 1.0: 0, 1.03: 0}
    for ratio in chosen:
        for seed in range(100):
            race = _Race({PLAIN: 50, STEP: 50 * ratio, ZERO: 50 * ratio}, noise=0.05)
            race.draw.seed(seed)
            last = _run(race, [STEP, ZERO], 5.0, monkeypatch)
            chosen[ratio] += is_surely_faster(race.ratios[last])
    assert chosen[0.85] >= 95 and chosen[1.0] <= 5 and chosen[1.03] <= 2, chosen


def test_a_round_that_was_disturbed_decides_nothing() -> None:
    assert is_surely_faster([0.9] * 9 + [3.0])
    assert not is_surely_faster([1.01] * 9 + [0.1])
    assert not is_surely_faster([0.99] * 50)
    assert not is_surely_faster([])


# What may be chosen ------------------------------------------------------------------------------------------------


def test_allow_and_updates_name_the_candidates() -> None:
    assert set(allowed("exact", "backward")) == {"ddp", "step"}
    assert set(allowed(["sharded"], "backward")) == {"ddp", "step", "zero", "zero-forward"}
    assert set(allowed("16-bit", "step")) == {"ddp", "bf16-deferred", "fp16-deferred"}
    assert allowed("exact", "backward")[0] == PLAIN
    for allow, updates, words in (
        ("4-bit", "backward", "allow has '4-bit'; known are"),
        ("sharded", "step", "allow has 'sharded', which"),
        ("exact", "late", "updates='late' is not"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            allowed(allow, updates)


class _Unknown(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def test_an_optimizer_rules_methods_out() -> None:
    def ruled_out(optimizer: torch.optim.Optimizer) -> set[str]:
        return {one.name for one in METHODS.values() if obstacle(one, optimizer) is not None}

    weight = [nn.Parameter(torch.ones(2))]
    assert ruled_out(torch.optim.SGD(weight, lr=0.1)) == set()
    deferred = {one.name for one in METHODS.values() if one.is_deferred}
    assert ruled_out(_Unknown(weight)) == METHODS.keys() - deferred
    scheduled = torch.optim.SGD(weight, lr=0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert ruled_out(scheduled) == {"zero", "zero-forward"}


# The plan ----------------------------------------------------------------------------------------------------------


def _row(candidate: str, ratios: Sequence[float] = (), note: str = "") -> Row:
    return Row(
        method=candidate,
        measured_ms=10 * quartiles(ratios)[1] if ratios else None,
        ratio=quartiles(ratios) if ratios else None,
        rounds=len(ratios),
        note=note,
    )


def test_the_reason_says_why() -> None:
    faster, slower = [0.8] * 6, [0.97, 1.0, 1.1, 0.96, 1.2]
    chosen, reason = decide(STEP, faster, is_complete=True)
    assert chosen == STEP and reason.endswith("needs updates='step'.")
    assert "it took 0.800 of plain DDP's step (quartiles 0.800 and 0.800) and won 6 of 6 rounds." in reason
    chosen, reason = decide(STEP, slower, is_complete=False)
    assert chosen == PLAIN and "the best of the others, step, took 1.000" in reason and "won 2 of 5 rounds" in reason
    assert reason.endswith("The time was too short for all candidates: give more seconds=.")
    assert decide(None, [], is_complete=True) == (PLAIN, "Plain DDP stays: no other candidate was raced.")
    assert "updates='step'" not in decide("bf16-deferred", faster, is_complete=True)[1]


def test_a_plan_is_printed_and_saved(tmp_path: Any) -> None:
    rows = (_row(STEP, [0.8, 0.7, 0.9]), _row(PLAIN), _row(BF16, note="sparse"))
    plan = Plan(method="step", ranks=2, rows=rows, reason="It was fast.")
    lines = [" ".join(line.split()) for line in str(plan).splitlines()]
    assert lines[1] == "> step in backward 8.00 0.800 (0.750 to 0.850) 3 exact"
    assert lines[3].endswith("16-bit (sparse)")
    assert lines[-1] == "It was fast."
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    with pytest.raises(ConfigurationError, match=r"is not a plan that Plan.save of this version wrote"):
        Plan.load(tmp_path / "nowhere.json")
    (tmp_path / "old.json").write_text('{"version": 2, "method": "ddp", "rows": []}')
    with pytest.raises(ConfigurationError, match=r"of this version wrote .*: leave plan out, and choose anew"):
        Plan.load(tmp_path / "old.json")
    with pytest.raises(ConfigurationError, match="method='none' is not one of ddp, step"):
        Plan(method="none", ranks=2, rows=(), reason="")
