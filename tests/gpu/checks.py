"""The checks: for each scenario what must hold of it, the controls that show that these can fail, memory and times."""

import gc
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measuring import MemoryMeter
from overlap import (
    AllReduce,
    OverlappedOptimizer,
    Step,
    Timeline,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap.hooks.collectives import Collective
from streams import loops
from streams.loops import Game
from streams.model import wrapped
from streams.scenarios import SCENARIOS, Scenario

from .host_waits import a_wait_is_found, no_host_wait
from .lateness import IN_ORDER, LATE_MODEL, LATE_STAGES, Lateness
from .sanitizer import Sanitizer, a_race_is_found

Run = Callable[[Scenario, int, torch.device], None]


@dataclass(frozen=True, kw_only=True)
class Check:
    """``run(scenario, rank, device)`` on every rank, in a default process group; raises where something fails."""

    run: Run
    needs_gpu: bool = False


def trained(
    scenario: Scenario, rank: int, device: torch.device, *, lateness: Lateness | None = None, is_plain: bool = False
) -> Tensor:
    """The parameters at the end, in one tensor on the CPU."""
    with lateness or nullcontext():
        ddp = wrapped(scenario.model, device, **scenario.ddp)
        if lateness is not None:
            lateness.watch(ddp.module)
        game = Game.of(ddp, rank)
        game.is_plain = is_plain
        game.optimizers = (scenario.plain if is_plain and scenario.plain else scenario.build)(ddp)
        scenario.loop(game)
        game.settle()
        return torch.cat([parameter.detach().reshape(-1) for parameter in ddp.parameters()]).cpu()


def parity(scenario: Scenario, rank: int, device: torch.device) -> None:
    """The update in backward is the plain one in every bit, as two ranks' sums are, and ranks are equal."""
    ours = trained(scenario, rank, device)
    assert bool(ours.isfinite().all())
    if scenario.plain is not None:
        _assert_equal(ours, trained(scenario, rank, device, is_plain=True), "beside plain DDP")
    if scenario.loop is not loops.trains_long:  # Local SGD's ranks differ between averages.
        of_rank_0 = ours.to(device)
        dist.broadcast(of_rank_0, 0)
        _assert_equal(ours, of_rank_0.cpu(), "beside rank 0")


def no_race(scenario: Scenario, rank: int, device: torch.device) -> None:
    """With streams made late the result is that of a run in which there can be no race, in every bit."""
    expected = trained(scenario, rank, device, lateness=Lateness(device, IN_ORDER))
    for where in (LATE_STAGES, LATE_MODEL):
        lateness = Lateness(device, where)
        _assert_equal(trained(scenario, rank, device, lateness=lateness), expected, where)
        assert lateness.delays > 0, f"{where}: nothing was made late, so nothing was tested"


def _assert_equal(ours: Tensor, theirs: Tensor, what: str) -> None:
    if not torch.equal(ours, theirs):
        differ = int((ours != theirs).sum())
        raise AssertionError(f"{what}: {differ} of {ours.numel()} differ, by up to {(ours - theirs).abs().max():g}")


def _sanitized(scenario: Scenario, rank: int, device: torch.device) -> None:
    with Sanitizer():
        trained(scenario, rank, device)


def _a_missing_wait_is_found(scenario: Scenario, rank: int, device: torch.device) -> None:
    """The check of races must fail where nothing waits for collectives, or it would prove nothing."""

    def forget(self: Collective, wait: Any) -> None:
        return finish(self, lambda work: None)

    finish = Collective.finish
    expected = trained(scenario, rank, device, lateness=Lateness(device, IN_ORDER))
    with patch.object(Collective, "finish", forget):
        wrong = trained(scenario, rank, device, lateness=Lateness(device, LATE_STAGES))
    same = torch.tensor([float(torch.equal(wrong, expected))], device=device)
    dist.all_reduce(same, op=dist.ReduceOp.MIN)
    assert same.item() == 0, "a chain that does not wait for its collectives computed the right numbers"


# Memory, of active bytes: what was freed while another stream might still use it is of no use to others. ---------

_WIDTH, _LAYERS, _STEPS = 1024 if torch.cuda.is_available() else 64, 8, 4


def _layers(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU()) for _ in range(_LAYERS))
    return nn.Sequential(*layers).to(device)


def _peak_bytes(model: nn.Module, optimizer: Any, device: torch.device, batch: int) -> int:
    gc.collect()  # A DDP model is part of a cycle: the one before may still be there.
    x = torch.randn(batch, _WIDTH, device=device)
    meter = MemoryMeter(device)
    for step in range(_STEPS):
        if step == _STEPS - 1:
            meter = MemoryMeter(device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return meter.peak_bytes()


def _updates_add_little(scenario: Scenario, rank: int, device: torch.device) -> None:
    """Beside plain DDP, an update in backward takes a few buckets more at most; where it releases gradients, all of
    them less; and a sharded one half of the state less. The peak is where the activations are: in backward."""
    batch = 2048 if device.type == "cuda" else 16
    names = ("plain DDP", "Step", "Step, deferred", "Step, released", "ZeroStep")
    peaks = {name: _peak_of(name, device, batch) for name in names}
    if device.type == "cuda":
        parameter_bytes = 4 * _LAYERS * _WIDTH * (_WIDTH + 1)
        assert max(peaks["Step"], peaks["Step, deferred"]) <= peaks["plain DDP"] + parameter_bytes // 2, peaks
        assert peaks["Step, released"] <= peaks["plain DDP"] - 0.9 * parameter_bytes, peaks
        assert peaks["ZeroStep"] <= peaks["plain DDP"] - 0.9 * parameter_bytes, peaks


def _peak_of(name: str, device: torch.device, batch: int) -> int:
    ddp = DistributedDataParallel(_layers(device), bucket_cap_mb=4, gradient_as_bucket_view=True)
    optimizer: Any = torch.optim.AdamW(ddp.parameters(), fused=True)
    if name == "ZeroStep":
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, fused=True)
        chain(ZeroStep(optimizer)).register(ddp)
    elif name != "plain DDP":
        optimizer = OverlappedOptimizer(optimizer)
        step = Step(optimizer, deferred="deferred" in name, release_gradients="released" in name)
        chain(AllReduce(), step).register(ddp)
    return _peak_bytes(ddp, optimizer, device, batch)


def _timeline(scenario: Scenario, rank: int, device: torch.device) -> None:
    """Of every bucket, what comes after what, on the device's own clock."""
    ddp = wrapped(scenario.model, device, **scenario.ddp)
    game = Game.of(ddp, rank)
    game.optimizers = scenario.build(ddp)
    loops.trains(game)
    with Timeline(ddp) as timeline:
        loops.trains(game)
    for own in timeline.report().steps:
        assert len(own.buckets) >= 3 and 0 < own.exposed_ms <= own.communication_ms < own.step_ms
        for bucket in own.buckets:
            assert (
                own.in_phase("backward")[0].start_ms <= bucket.ready_ms <= bucket.reduce.start_ms < bucket.reduce.end_ms
            )
            assert bucket.update is not None
            assert bucket.reduce.end_ms <= bucket.update.start_ms < bucket.update.end_ms <= own.step_ms


_PLAYED = (
    "all-reduce, no update",
    "all-reduce, interleaved",
    "4 bits, feedback, interleaved",
    "factors, interleaved",
    "two updates, deferred",
    "sharded by parameter",
    "sharded, deferred",
    "sharded, in the next forward",
    "log, skip",
    "clip the norm, sharded",
    "unused, sharded, in the next forward",
    "released",
    "joins",
    "local, overlapped",
    "local, fragments, outer",
)
_HOST_WAITS, _SANITIZED = Check(run=no_host_wait, needs_gpu=True), Check(run=_sanitized, needs_gpu=True)


def _topics(scenario: Scenario) -> dict[str, Check]:
    topics = {"parity": Check(run=parity), "races": Check(run=no_race)}
    # Ranks under a Join tell each other who is left, DDP waits where a parameter was unused, and loops read values.
    if scenario.loop is loops.trains and "find_unused_parameters" not in scenario.ddp:
        topics["host waits"] = _HOST_WAITS
    return {**topics, "sanitizer": _SANITIZED}


CHECKS: Mapping[str, tuple[Scenario, dict[str, Check]]] = {
    "controls": (
        SCENARIOS["all-reduce, interleaved"],
        {
            "races": Check(run=_a_missing_wait_is_found, needs_gpu=True),
            "host waits": Check(run=a_wait_is_found, needs_gpu=True),
            "sanitizer": Check(run=a_race_is_found, needs_gpu=True),
        },
    ),
    "resources": (
        SCENARIOS["all-reduce, interleaved"],
        {
            "times": Check(run=_timeline),
            "memory": Check(run=_updates_add_little),
        },
    ),
    **{name: (SCENARIOS[name], _topics(SCENARIOS[name])) for name in _PLAYED},
}
"""By subject: a scenario, and by topic what must hold of it."""
