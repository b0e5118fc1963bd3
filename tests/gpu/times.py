"""What is measured on the device's own clock, and what goes on beside the computation."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from benchmarks.simulated import SimulatedGroup, SimulatedLink
from overlap import Timeline, offload_wrapper

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


def _copies_beside_kernels(rank: int, world_size: int, device: torch.device) -> dict[str, int]:
    """Activations go to the CPU and come back while the GPU computes."""
    from torch.profiler import ProfilerActivity, profile

    block = offload_wrapper(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).to(device))
    x = torch.randn(8192, 2048, device=device)
    block(x).sum().backward()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        block(x).sum().backward()
        torch.cuda.synchronize(device)
    events = [event for event in profiler.events() or [] if event.device_type.name == "CUDA"]
    copies = [event.time_range for event in events if "Memcpy" in event.name]
    kernels = [event.time_range for event in events if "Memcpy" not in event.name]
    beside = sum(any(k.start < copy.end and copy.start < k.end for k in kernels) for copy in copies)
    assert beside >= 4, f"{beside} of {len(copies)} copies beside one of {len(kernels)} kernels"
    return {"copies": len(copies), "beside_kernels": beside}


def time_checks() -> list[Check]:
    return [
        Check(name="times: a timeline", topic="times", run=_timeline),
        Check(name="times: a simulated link", topic="times", run=_simulated_link, ranks=1),
        Check(name="times: offloaded copies", topic="times", run=_copies_beside_kernels, ranks=1, devices=("cuda",)),
    ]
