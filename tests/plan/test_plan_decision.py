"""What is chosen from profiles and samples that are given: nothing here is measured."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap import ConfigurationError, Plan
from overlap.plan.buckets import cut
from overlap.plan.candidates import CANDIDATES, METHODS, Candidate
from overlap.plan.decision import Belief, Evidence, Options
from overlap.plan.dry import BucketCost
from overlap.plan.link import Line, Link
from overlap.plan.optimizers import sharding_obstacle
from overlap.plan.predict import predict, ranking, schedule_of
from overlap.plan.profile import ParameterTimes, Profile
from overlap.plan.request import allowed_candidates

PLAIN, STEP, ZERO = Candidate("ddp"), Candidate("step"), Candidate("zero-forward")
LAYERS = 10
PROFILE = Profile(
    forward_ms=20,
    backward_ms=40,
    update_ms=5,
    copy_ms=0,
    handover_ms=0,
    state_bytes=8 * LAYERS * 2**18,
    parameters=tuple(
        ParameterTimes(name=f"{k}", shape=(2**18,), ready_ms=4 * (k + 1), needed_ms=18 - 2 * k) for k in range(LAYERS)
    ),
)
BYTES = PROFILE.gradient_bytes


def link(bytes_per_ms: float, *, ranks: int = 2, latency_ms: float = 0.0) -> Link:
    line = Line(latency_ms=latency_ms, bytes_per_ms=bytes_per_ms)
    return Link(ranks=ranks, all_reduce=line, messages=line)


def costs(method: Any, layout: Sequence[Sequence[ParameterTimes]]) -> list[BucketCost]:
    """Compressors that take a fixed time a byte."""
    sent = {"16-bit": 0.5, "8-bit": 0.25, "low-rank": 0.02, "exact": 1.0}[method.kind]
    slow = {"16-bit": 1e-7, "8-bit": 1e-6, "low-rank": 2e-6, "exact": 0.0}[method.kind]
    sizes = [sum(one.nbytes for one in bucket) for bucket in layout]
    return [
        BucketCost(before_ms=(slow * n,), kinds=("all_reduce",), sent_bytes=(int(n * sent),), after_ms=0) for n in sizes
    ]


def options(on: Link, *, kinds: Sequence[str] = ("exact",), memory: Any = None, obstacle: str | None = None) -> Options:
    allowed = [one for one in CANDIDATES if METHODS[one.method].kind in kinds]
    ruled_out = {name: obstacle for name in ("zero", "zero-forward") if obstacle}
    return Options.of(ranking(allowed, PROFILE, on, costs), memory=memory, obstacles=ruled_out)


def decided(made: Options, samples: Any = None, refused: Any = None) -> Plan:
    return made.decide(samples or {}, refused or {}, ranks=2, compute="", link="", seconds=1.0)


def test_on_a_slow_link_the_gather_goes_into_the_forward_and_what_is_lossy_waits_to_be_allowed() -> None:
    slow = link(BYTES / 200)
    assert decided(options(slow)).method == "zero-forward"
    assert decided(options(slow, kinds=("exact", "16-bit"))).method in ("fp16", "bf16")
    assert decided(options(slow, kinds=("exact", "16-bit", "8-bit"))).method == "int8"
    assert decided(options(slow, kinds=("exact", "16-bit", "8-bit", "low-rank"))).method == "powersgd-4"


def test_where_nothing_is_to_be_gained_plain_ddp_stays() -> None:
    small = dataclasses.replace(PROFILE, update_ms=0.5)
    found = ranking([one for one in CANDIDATES if METHODS[one.method].kind == "exact"], small, link(1e9), costs)
    plan = decided(Options.of(found, memory=None, obstacles={}))
    assert plan.candidate == PLAIN
    assert "stays" in plan.reason


def test_plain_ddp_is_the_closed_form_and_its_update() -> None:
    found = predict(PLAIN, PROFILE, link(BYTES / 10), costs)
    # Buckets of 1 MB and of the rest, which is ready at the end: both halves of 10 ms on the link.
    assert found.step_ms == pytest.approx(20 + 40 + 10 * (LAYERS - 1) / LAYERS + 5)
    assert found.sent_bytes == BYTES
    assert found.memory_bytes == 3 * BYTES + PROFILE.state_bytes


def test_each_bucket_is_updated_as_the_next_one_comes_and_a_sharded_update_is_a_ranks_part() -> None:
    free = link(1e30)
    assert [len(bucket) for bucket in cut(PROFILE.parameters, 8.0)] == [8, 2]
    whole = predict(Candidate("step", 8.0), PROFILE, free, costs).step_ms
    part = predict(Candidate("zero", 8.0), PROFILE, free, costs).step_ms
    # Eight layers' update begins when the last two have come, at 40, and theirs follows.
    assert whole == pytest.approx(20 + 40 + 5)
    assert part == pytest.approx(20 + 40 + 5 / 2)
    # With buckets of 2 MB all but the last two are updated beside backward.
    assert predict(Candidate("step", 2.0), PROFILE, free, costs).step_ms == pytest.approx(20 + 40 + 2 * 5 / 5)


def test_gathers_left_to_the_forward_are_of_the_parts_that_the_library_makes() -> None:
    layout = cut(PROFILE.parameters, 8.0)
    schedule, _ = schedule_of(METHODS["zero-forward"], layout, PROFILE, link(BYTES / 10), costs)
    # Parameters have 1 MB, which is enough for a part; the forward begins with the last of the last bucket.
    assert [gather.needed_ms for gather in schedule.gathers] == [2.0 * place for place in range(LAYERS)]
    assert sum(gather.link_ms for gather in schedule.gathers) == pytest.approx(10 / 2)
    assert not schedule_of(METHODS["zero"], layout, PROFILE, link(BYTES / 10), costs)[0].gathers


def test_memory_of_a_sharded_optimizer_is_its_part() -> None:
    assert predict(ZERO, PROFILE, link(1e6, ranks=4), costs).memory_bytes == 3 * BYTES + PROFILE.state_bytes / 4


def best(samples: Any, predicted: Any = None) -> Candidate:
    """Of what was raced; `predicted` are ratios to plain DDP, whose step takes 100 ms."""
    predicted_ms = {PLAIN: 100.0, **{name: 100 * ratio for name, ratio in (predicted or {}).items()}}
    return Evidence(samples, predicted_ms).best(samples)


@pytest.mark.parametrize(
    ("ratios", "chosen"),
    [
        ([0.9] * 5, STEP),
        ([1.0] * 5, PLAIN),  # Plain DDP wins ties,
        ([0.99] * 30, PLAIN),  # and what is closer than 2 %,
        ([0.5, 0.5, 0.5, 1.5, 1.6], PLAIN),  # and what is spread so much that it may be chance.
        ([0.7, 0.8, 0.9, 0.97, 1.3], PLAIN),
        ([0.9] * 3, PLAIN),  # Few rounds take a larger difference.
        ([0.85] * 3, STEP),
        ([0.85] * 2, PLAIN),
        ([0.75] * 2, STEP),
        ([0.6], PLAIN),  # One shows nothing.
        ([1.2] * 5, PLAIN),
    ],
)
def test_a_candidate_must_surely_be_faster(ratios: list[float], chosen: Candidate) -> None:
    samples = {PLAIN: [100.0] * len(ratios), STEP: [100 * ratio for ratio in ratios]}
    assert best(samples) == chosen


def test_what_was_predicted_and_what_was_measured_count_by_how_exact_they_are() -> None:
    evidence = Evidence({PLAIN: [100.0] * 4, STEP: [90.0] * 4}, {PLAIN: 100.0, STEP: 80.0, ZERO: 80.0})
    predicted, measured = evidence.predicted(STEP), evidence.measured(STEP)
    assert predicted is not None and measured is not None
    assert predicted == Belief(math.log(0.8), 0.2)  # A tenth, and 10 ms of 100.
    # Four ratios without a spread, beside four of 0.12 that are supposed: seven are free.
    assert measured == pytest.approx(Belief(math.log(0.9), 0.12 * math.sqrt(4 / 7) / 2))
    belief = evidence.belief(STEP)
    assert measured.log_ratio > belief.log_ratio > predicted.log_ratio
    assert belief.error == pytest.approx((predicted.error**-2 + measured.error**-2) ** -0.5)
    assert evidence.measured(ZERO) is None and evidence.belief(ZERO) == pytest.approx(predicted)
    assert Belief(0.0, 0.1).probability == pytest.approx(0.5)
    assert Belief(-0.1, 0.1).probability == pytest.approx(0.8413, abs=1e-4)


def test_the_spread_is_that_of_all_that_were_raced() -> None:
    steady = {PLAIN: [100.0] * 3, STEP: [90.0] * 3}
    shaken = {**steady, ZERO: [80.0, 110.0, 150.0]}
    errors = [measured.error for one in (steady, shaken) if (measured := Evidence(one, {}).measured(STEP)) is not None]
    assert errors[1] > 1.5 * errors[0]


def test_a_prediction_changes_what_is_chosen_only_where_little_was_measured() -> None:
    few, many = ({PLAIN: [1000.0] * count, STEP: [850.0] * count} for count in (2, 20))
    predicted = [{PLAIN: 1000.0, STEP: ms} for ms in (800.0, 1100.0)]
    assert [Evidence(few, one).best(few) for one in predicted] == [STEP, PLAIN]
    assert [Evidence(many, one).best(many) for one in predicted] == [STEP, STEP]


def test_what_has_left_a_race_is_not_chosen() -> None:
    samples: dict[Candidate, list[float | None]] = {
        PLAIN: [100.0, 100.0, 100.0, 100.0, 100.0, 100.0],
        STEP: [70.0, 70.0, 70.0, None, None, None],
        ZERO: [60.0, 60.0, 60.0, 90.0, 90.0, 90.0],
    }
    assert best(samples) == ZERO


def test_a_round_counts_for_those_that_were_in_it() -> None:
    samples: dict[Candidate, list[float | None]] = {
        PLAIN: [100.0, 200.0, 400.0, 100.0],
        STEP: [90.0, 180.0, 360.0, None],
        ZERO: [None, 160.0, 320.0, 80.0],
    }
    assert best(samples) == ZERO
    plan = decided(options(link(1e6)), samples)
    assert "took 0.800 of plain DDP's step in the race" in plan.reason
    assert [row.measured_ms for row in plan.rows[:3]] == [150.0, 160.0, 180.0]


def test_where_there_was_no_race_the_reason_says_how_long_one_takes() -> None:
    slow = options(link(BYTES / 200))
    assert "There was no time for a race of such long steps; seconds=" in decided(slow).reason
    refused = {one.candidate: "sparse" for one in slow.predictions if not one.candidate.is_plain}
    assert decided(slow, refused=refused).reason.endswith("what was to race against it does not take this model.")
    alone = Options.of([one for one in slow.predictions if one.candidate.is_plain], memory=None, obstacles={})
    assert (
        decided(alone).reason
        == "Plain DDP stays: nothing is predicted to be faster by so much that it would be sure without a race."
    )


def test_the_fastest_of_those_that_are_surely_faster() -> None:
    samples = {PLAIN: [100.0] * 5, STEP: [90.0] * 5, ZERO: [80.0] * 5}
    assert best(samples) == ZERO
    # A drift of the machine touches all of a round alike.
    drift = (1, 2, 3, 4, 5)
    drifting = {name: [ms * k for ms, k in zip(times, drift, strict=True)] for name, times in samples.items()}
    assert best(drifting) == ZERO


def test_small_memory_leaves_only_what_takes_less_and_then_plain_ddp_is_not_the_limit() -> None:
    made = options(link(1e6), memory="small")
    assert {one[0] for one in made.order()[1:]} == {"zero", "zero-forward"}
    samples = {PLAIN: [100.0] * 3, ZERO: [120.0] * 3}
    plan = decided(made, samples)
    assert plan.candidate == ZERO
    assert "takes no less memory" in plan.reason
    assert all(row.note for row in plan.rows if not row.update.startswith("sharded"))


def test_memory_as_a_number() -> None:
    least = min(one.memory_bytes for one in options(link(1e6)).predictions)
    assert decided(options(link(1e6), memory=least)).method.startswith("zero")
    with pytest.raises(ConfigurationError, match=rf"memory={least - 1} leaves nothing .* {least} bytes"):
        options(link(1e6), memory=least - 1)


def test_an_optimizer_that_cannot_be_sharded_rules_sharding_out_and_says_why() -> None:
    plan = decided(options(link(BYTES / 200), obstacle="a scheduler holds it"))
    assert not plan.method.startswith("zero")
    assert "a scheduler holds it" in plan.table()


def test_what_could_not_be_built_is_not_chosen() -> None:
    made = options(link(BYTES / 200))
    refused = {one.candidate: "couples parameters" for one in made.predictions if not one.candidate.is_plain}
    plan = decided(made, refused=refused)
    assert plan.candidate == PLAIN
    assert "couples parameters" in plan.table()


def test_the_order_begins_with_plain_ddp_and_leaves_out_the_hopeless() -> None:
    order = options(link(BYTES / 200, latency_ms=0.1)).order()
    assert order[0][0] == "ddp"
    assert order[0][1] is None
    times_ms = [ms for *_, ms in order[1:]]
    assert times_ms == sorted(times_ms)
    assert all(ms <= 1.3 * order[0][2] for ms in times_ms)


def test_a_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    plan = decided(options(link(BYTES / 200)), {PLAIN: [2.0] * 5, ZERO: [1.0] * 5})
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert str(loaded) == str(plan)
    assert str(plan).splitlines()[1].startswith(">  zero-forward")


def test_a_plan_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from overlap.plan.picture import save_plan

    save_plan(decided(options(link(BYTES / 200)), {PLAIN: [2.0] * 5, ZERO: [1.0] * 5}), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"version": 2, "rows": []}'])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"other\.json.* is not a plan"):
        Plan.load(tmp_path / "other.json")


def test_a_plan_names_a_method_that_exists() -> None:
    with pytest.raises(ConfigurationError, match="method='magic' is not one of ddp"):
        Plan(method="magic", bucket_cap_mb=None, ranks=2, rows=(), reason="")


@pytest.mark.parametrize(("allow", "are_there"), [("exact", False), (("16-bit",), False), ("sharded", True)])
def test_a_sharded_optimizer_must_be_allowed_by_name(allow: Any, are_there: bool) -> None:
    found = allowed_candidates(allow)
    assert any(METHODS[one.method].is_sharded for one in found) == are_there
    assert PLAIN in found


def test_small_memory_without_sharding_says_what_to_allow() -> None:
    found = ranking(allowed_candidates("exact"), PROFILE, link(1e6), costs)
    with pytest.raises(ConfigurationError, match=r"memory='small' leaves nothing .* if allow names 'sharded'"):
        Options.of(found, memory="small", obstacles={})


class _WithAttribute(torch.optim.SGD):
    def __init__(self, params: Any, lr: float, slow: float = 1.0) -> None:
        super().__init__(params, lr=lr)
        self.slow = slow


class _WithoutDefault(torch.optim.SGD):
    def __init__(self, params: Any, scale: float) -> None:
        super().__init__(params, lr=scale)


def test_what_an_optimizer_made_anew_would_lack_rules_sharding_out() -> None:
    layer = torch.nn.Linear(2, 2)
    hooked = torch.optim.AdamW(layer.parameters())
    hooked.register_step_post_hook(lambda *_: None)
    scheduled = torch.optim.AdamW(layer.parameters())
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    cases = [
        (hooked, "has hooks"),
        (scheduled, "scheduler"),
        (_WithAttribute(layer.parameters(), 0.1, slow=0.1), "keeps 'slow'"),
        (_WithoutDefault(layer.parameters(), 0.1), "cannot be made anew"),
    ]
    for optimizer, words in cases:
        assert words in str(sharding_obstacle(optimizer))
    groups = [{"params": [layer.weight], "lr": 0.1, "name": "w"}, {"params": [layer.bias], "weight_decay": 0.0}]
    for optimizer in (torch.optim.AdamW(groups, lr=0.2, fused=True), _WithAttribute(layer.parameters(), 0.1)):
        assert sharding_obstacle(optimizer) is None


def _noise(draw: random.Random, spread: float, *, disturbed: float) -> float:
    """Of one sample; another process takes half as much again of a share of them."""
    return draw.lognormvariate(0, spread) * (1.5 if draw.random() < disturbed else 1.0)


@pytest.mark.parametrize("rounds", [2, 3, 4, 5, 8, 10, 16, 30, 100])
@pytest.mark.parametrize(("noise", "disturbed"), [(0.03, 0.0), (0.05, 0.0), (0.1, 0.0), (0.03, 0.05)])
def test_what_is_slower_by_3_percent_hardly_ever_wins(rounds: int, noise: float, disturbed: float) -> None:
    """Two such challengers, whose predictions were wrong by a tenth."""
    draw, races = random.Random(0), 500
    wrong = 0
    for _ in range(races):
        samples = {
            name: [_noise(draw, noise, disturbed=disturbed) for _ in range(rounds)] for name in (PLAIN, STEP, ZERO)
        }
        for name in (STEP, ZERO):
            samples[name] = [1.03 * ms for ms in samples[name]]
        wrong += best(samples, {STEP: 0.93, ZERO: 0.93}) != PLAIN
    assert wrong <= 0.02 * races


@pytest.mark.parametrize("disturbed", [0.0, 0.05])
def test_what_is_faster_by_10_percent_usually_wins(disturbed: float) -> None:
    draw, races = random.Random(0), 300
    found = 0
    for _ in range(races):
        samples = {name: [_noise(draw, 0.03, disturbed=disturbed) for _ in range(10)] for name in (PLAIN, STEP)}
        samples[STEP] = [0.9 * ms for ms in samples[STEP]]
        found += best(samples) == STEP
    assert found >= (0.9 if disturbed == 0 else 0.75) * races


def test_what_took_no_step_is_refused_with_all_its_sizes_and_plain_ddp_stays_without_a_rival() -> None:
    made = options(link(BYTES / 200))
    plan = decided(made, {PLAIN: [100.0] * 5}, {Candidate("step", 8.0): "sparse"})
    assert plan.candidate == PLAIN
    assert all(row.note == "sparse" for row in plan.rows if row.method == "step")
    with pytest.raises(ConfigurationError, match="nothing that may be chosen and was raced"):
        decided(options(link(1e6), memory="small"), {PLAIN: [100.0] * 5}, {ZERO: "sparse"})


def test_updates_in_step_leave_plain_ddp_and_deferred_reducers() -> None:
    assert {one.method for one in allowed_candidates("exact", updates="step")} == {"ddp"}
    found = {one.method for one in allowed_candidates(("16-bit", "low-rank"), updates="step")}
    assert found == {"ddp", "bf16-deferred", "fp16-deferred", "powersgd-4-deferred"}
    assert all(METHODS[name].is_deferred for name in found)
    assert not any("deferred" in one.method for one in allowed_candidates("16-bit"))
    with pytest.raises(ConfigurationError, match="allow has 'sharded'"):
        allowed_candidates("sharded", updates="step")
    with pytest.raises(ConfigurationError, match="updates='late' is not"):
        allowed_candidates("exact", updates="late")


def test_the_reason_says_that_an_update_in_backward_refuses_clipping() -> None:
    slow = options(link(BYTES / 200))
    assert "needs updates='step'" in decided(slow).reason
    found = ranking(allowed_candidates("16-bit", updates="step"), PROFILE, link(BYTES / 200), costs)
    plan = decided(Options.of(found, memory=None, obstacles={}))
    assert plan.method.endswith("16-deferred")
    assert "updates='step'" not in plan.reason
