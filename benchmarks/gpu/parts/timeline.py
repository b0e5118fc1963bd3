"""Where a step's time goes: what of the update and of the link hid behind the computation."""

from __future__ import annotations

import importlib.util
import pickle
import statistics
from collections.abc import Sequence

from torch import nn

from benchmarks.bench.variants import TrainingSetup, registry
from benchmarks.gpu.given import Given
from benchmarks.gpu.trained import TITLES, Trainee, bytes_per_s, open_link
from benchmarks.recipes import Recipe, Update, plain, sharded, stepped
from benchmarks.simulated import SimulatedLink
from overlap import PowerSGD, Timeline
from overlap.timeline import Interval, Report, StepReport, save_reports
from overlap.timeline.spans import intersection, length_ms, union, without

_WARMUP_STEPS = 4
_STEPS = 8
# The first is longer: the recording has just begun.
_LEFT_OUT = 1
_SAVED = "saved"

_link: SimulatedLink
_trainee: Trainee


_WAYS: dict[str, Recipe] = {
    "plain DDP": plain,
    "AllReduce, Step": stepped(),
    "AllReduce, Step, deferred": stepped(deferred=True),
    "ZeroStep, gather in forward": sharded(gather="forward"),
    "PowerSGD, Step, deferred": stepped(lambda: PowerSGD(rank=4), deferred=True),
}


def cases(given: Given) -> list[str]:
    global _link, _trainee
    _link = open_link(given)
    _trainee = Trainee.of(given.sizes.timeline_model, given)
    return [*list(_WAYS)[: given.sizes.variants], _SAVED]


def run(case: str, given: Given) -> None:
    if case == _SAVED:
        _save(given)
        return
    _link.bandwidth_bytes_per_s = bytes_per_s(given.sizes.timeline_gbit)
    setup = _trainee.setup(registry()["ddp-adamw-fused"])
    ddp = setup.ddp()
    update = _WAYS[case](ddp, setup.make)
    _train(ddp, update, setup, _WARMUP_STEPS)
    _trainee.synchronize()
    with Timeline(ddp) as timeline:
        _train(ddp, update, setup, _STEPS)
    (given.shared / f"{case}.timeline").write_bytes(pickle.dumps(timeline.steps))
    table = f"{TITLES[_trainee.name]}; {given.sizes.simulated_ranks} ranks, {given.sizes.timeline_gbit:g} Gbit/s"
    given.row(table, {"chain": case, **_figures(timeline.steps[_LEFT_OUT:])})


def _train(ddp: nn.Module, update: Update, setup: TrainingSetup, steps: int) -> None:
    for _ in range(steps):
        setup.loss(ddp).backward()
        update.step()
        update.clear()


def _figures(steps: Sequence[StepReport]) -> dict[str, float]:
    """Medians over the steps, in ms."""
    found = [_of_step(step) for step in steps]
    return {name: round(statistics.median(one[name] for one in found), 3) for name in found[0]}


def _of_step(step: StepReport) -> dict[str, float]:
    phases: list[Interval] = [*step.in_phase("forward"), *step.in_phase("loss"), *step.in_phase("backward")]
    computing = without(phases, step.waits)
    in_stages = [one for bucket in step.buckets for one in bucket.activities if one.kind == "update"]
    update = union([*(one for one in in_stages if not one.is_collective), *step.in_phase("optimizer")])
    return {
        "step ms": step.step_ms,
        "forward ms": step.phase_ms("forward"),
        "backward ms": step.phase_ms("backward"),
        "update ms": length_ms(update),
        "update hidden ms": length_ms(intersection(update, computing)),
        "communication ms": step.communication_ms,
        "hidden ms": step.communication_ms - step.exposed_ms,
        "exposed ms": step.exposed_ms,
    }


def _save(given: Given) -> None:
    """A trace for Perfetto, and a picture where matplotlib is there."""
    reports = {}
    for way in _WAYS:
        path = given.shared / f"{way}.timeline"
        if path.exists():
            reports[way] = Report(title=way, ranks=(pickle.loads(path.read_bytes()),))
    save_reports(reports, given.folder / "timeline.json")
    given.file("timeline.json")
    if importlib.util.find_spec("matplotlib") is None:
        given.note("There is no picture: matplotlib is not installed.")
        return
    save_reports(reports, given.folder / "timeline.png")
    given.file("timeline.png")
