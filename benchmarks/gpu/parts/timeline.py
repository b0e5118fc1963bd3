"""Where a step's time goes: what of the update and of the link hid behind the computation."""

from __future__ import annotations

import importlib.util
import pickle
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.bench.variants import LEARNING_RATE, TrainingSetup, registry
from benchmarks.gpu.given import Given
from benchmarks.gpu.trained import TITLES, Trainee, bytes_per_s, open_link
from benchmarks.simulated import SimulatedLink
from overlap import AllReduce, OverlappedOptimizer, PowerSGD, Step, Timeline, ZeroRedundancyOptimizer, ZeroStep, chain
from overlap.timeline import Interval, Report, StepReport, save_reports
from overlap.timeline.spans import intersection, length_ms, union, without

_WARMUP_STEPS = 4
_STEPS = 8
# The first is longer: the recording has just begun.
_LEFT_OUT = 1
_SAVED = "saved"

Register = Callable[[DistributedDataParallel, TrainingSetup], Any]

_link: SimulatedLink
_trainee: Trainee


def _plain(ddp: DistributedDataParallel, setup: TrainingSetup) -> Any:
    return setup.optimizer(ddp.parameters())


def _step(**options: Any) -> Register:
    def register(ddp: DistributedDataParallel, setup: TrainingSetup) -> Any:
        optimizer = OverlappedOptimizer(setup.optimizer(ddp.parameters()))
        chain(AllReduce(), Step(optimizer, **options)).register(ddp)
        return optimizer

    return register


def _zero(**options: Any) -> Register:
    def register(ddp: DistributedDataParallel, setup: TrainingSetup) -> Any:
        zero = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, process_group=setup.group, overlap_with_ddp=True, lr=LEARNING_RATE,
            fused=True,
        )  # fmt: skip
        chain(ZeroStep(zero, **options)).register(ddp)
        return zero

    return register


def _powersgd(ddp: DistributedDataParallel, setup: TrainingSetup) -> Any:
    optimizer = OverlappedOptimizer(setup.optimizer(ddp.parameters()))
    chain(PowerSGD(rank=4), Step(optimizer, deferred=True)).register(ddp)
    return optimizer


_WAYS: dict[str, Register] = {
    "plain DDP": _plain,
    "AllReduce, Step": _step(),
    "AllReduce, Step, deferred": _step(deferred=True),
    "ZeroStep, gather in forward": _zero(gather="forward"),
    "PowerSGD, Step, deferred": _powersgd,
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
    optimizer = _WAYS[case](ddp, setup)
    _train(ddp, optimizer, setup, _WARMUP_STEPS)
    _trainee.synchronize()
    with Timeline(ddp) as timeline:
        _train(ddp, optimizer, setup, _STEPS)
    (given.shared / f"{case}.timeline").write_bytes(pickle.dumps(timeline.steps))
    table = f"{TITLES[_trainee.name]}; {given.sizes.simulated_ranks} ranks, {given.sizes.timeline_gbit:g} Gbit/s"
    given.row(table, {"chain": case, **_figures(timeline.steps[_LEFT_OUT:])})


def _train(ddp: nn.Module, optimizer: Any, setup: TrainingSetup, steps: int) -> None:
    for _ in range(steps):
        setup.loss(ddp).backward()
        optimizer.step()
        optimizer.zero_grad()


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
