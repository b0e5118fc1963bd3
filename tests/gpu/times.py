"""What is measured on the device's own clock, and what goes on beside the computation."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.simulated import SimulatedGroup, SimulatedLink
from overlap import Timeline

from .chains import CHAINS
from .check import Check
from .training import Training

__all__ = ["time_checks"]

_STEPS = 4


def _timeline(rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
    """Of every bucket, what comes after what."""
    training = Training.of(CHAINS["AllReduce, Step"], rank, device)
    training.run()
    with Timeline(training.ddp) as timeline:
        training.run(_STEPS)
    report: Any = timeline.report()
    assert [len(steps) for steps in report.ranks] == [_STEPS] * world_size
    for own in report.steps:
        assert len(own.buckets) >= 3 and 0 < own.exposed_ms <= own.communication_ms < own.step_ms
        for bucket in own.buckets:
            assert own.backward.start_ms <= bucket.ready_ms <= bucket.reduce.start_ms < bucket.reduce.end_ms
            assert bucket.reduce.end_ms <= bucket.update.start_ms < bucket.update.end_ms <= own.step_ms
    return {"step_ms": [own.step_ms for own in report.steps], "exposed_ms": [own.exposed_ms for own in report.steps]}


def _simulated_link(rank: int, world_size: int, device: torch.device) -> dict[str, float]:
    """It costs its time, and the host only launches."""
    group = SimulatedGroup(2, SimulatedLink(bandwidth_bytes_per_s=1e9))
    tensor = torch.ones(5_000_000, device=device)
    group.allreduce([tensor]).wait()
    tensor.fill_(1.0)
    tensor.sum().item()
    start = time.perf_counter()
    work = group.allreduce([tensor])
    launched_s = time.perf_counter() - start
    work.wait()
    total = float(tensor.sum())
    elapsed_s = time.perf_counter() - start
    assert total == 10_000_000
    # 20 MB at 1 GB/s.
    assert launched_s < 0.015, f"the host waited {launched_s:.3f} s"
    assert 0.018 < elapsed_s < 0.030 or (device.type == "cpu" and elapsed_s > 0.018), f"{elapsed_s:.3f} s"
    return {"launched_s": launched_s, "elapsed_s": elapsed_s}


def time_checks() -> list[Check]:
    return [
        Check(name="times: a timeline", topic="times", run=_timeline),
        Check(name="times: a simulated link", topic="times", run=_simulated_link, ranks=1),
    ]
