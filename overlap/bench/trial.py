"""One variant alone in a process: does it run at all, what does it send, and how much memory does it take?"""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from overlap.bench.collectives import counting
from overlap.bench.floor import StepProfile
from overlap.bench.measurements import ModelProfile, Trial
from overlap.bench.memory import MemoryMeter, available_bytes
from overlap.bench.registry import registry
from overlap.bench.settings import OPTIMIZERS, RunConfig
from overlap.bench.wire import sent_bytes_counter
from overlap.bench.world import BenchWorld, open_world
from overlap.timeline.clock import Clock, clock_for

PROFILE = "profile"
_COUNTED_STEPS = 2
_PROFILED_STEPS = 3


def try_variant(config: RunConfig, rank: int, name: str) -> Trial:
    """Runs variant `name` for a few steps; meant for a process of its own, which it may crash."""
    one = registry()[name]
    with open_world(config, rank, name) as world:
        meter = MemoryMeter(world.device)
        loop = one.build(world.training_setup(one.optimizer))
        sent_bytes = sent_bytes_counter(config.link)
        steps = one.block_steps if one.block_steps > 1 else _COUNTED_STEPS
        warmup_steps = max(config.settings.warmup_steps, one.block_steps)
        with loop.block(warmup_steps + steps):
            for _ in range(warmup_steps):
                loop.step()
            loop.finish()
            world.synchronize()
            # A rank may be done while its last packets wait to leave: only when every rank is here is all of it sent.
            world.wait_for_ranks("warm")
            before_bytes = sent_bytes()
            # Where a link has neither an interface nor sockets of ours to look at.
            with counting() if config.link == "direct" else nullcontext():
                for _ in range(steps):
                    loop.step()
                loop.finish()
            world.synchronize()
            world.wait_for_ranks("counted")
            sent = sent_bytes() - before_bytes
            world.wait_for_ranks("read")
        return Trial(sent_bytes_per_step=sent / steps, peak_memory_bytes=meter.peak_bytes())


def profile_model(config: RunConfig, rank: int) -> ModelProfile:
    """Measures the model without communication, and the link without the model."""
    with open_world(config, rank, PROFILE) as world:
        limit_bytes = available_bytes(world.device, config.processes)
        step = _profile_step(world)
        return ModelProfile(step=step, memory_limit_bytes=limit_bytes, link_bytes_per_s=_link_speed(world))


def _profile_step(world: BenchWorld) -> StepProfile:
    setup = world.training_setup()
    ddp = setup.ddp()
    clock = clock_for(world.device)
    marks: list[Any] = []
    bucket_bytes: list[int] = []

    def record(state: object, bucket: Any) -> Any:
        marks.append(clock.now())
        bucket_bytes.append(bucket.buffer().nbytes)
        done: torch.futures.Future[Any] = torch.futures.Future(
            devices=[world.device] if world.device.type == "cuda" else None
        )
        done.set_result(bucket.buffer())
        return done

    # DDP compares annotations with the types themselves, and here they are strings.
    record.__annotations__.clear()
    ddp.register_comm_hook(None, record)
    steps: list[list[float]] = []
    for _ in range(world.config.settings.warmup_steps + _PROFILED_STEPS):
        world.wait_for_ranks(f"step{len(steps)}")
        bucket_bytes.clear()
        ddp.zero_grad()
        world.synchronize()
        marks[:] = [clock.now()]
        setup.loss(ddp).backward()
        marks.append(clock.now())
        steps.append(_elapsed_ms(clock, marks))
    middle = [statistics.median(times) for times in zip(*steps[-_PROFILED_STEPS:], strict=True)]
    update_ms = {}
    for name in OPTIMIZERS:
        optimizer = setup.optimizer(ddp.parameters(), name)
        # The first step creates the state.
        optimizer.step()
        world.synchronize()
        start = clock.now()
        for _ in range(_PROFILED_STEPS):
            optimizer.step()
        (elapsed_ms,) = _elapsed_ms(clock, [start, clock.now()])
        update_ms[name] = elapsed_ms / _PROFILED_STEPS
    return StepProfile(
        compute_ms=middle[-1],
        ready_ms=tuple(middle[:-1]),
        bucket_bytes=tuple(bucket_bytes),
        update_ms=update_ms,
    )


def _link_speed(world: BenchWorld) -> float:
    """Bytes per second that an all-reduce of a few megabytes gets out of the link."""
    ranks = world.config.settings.ranks
    speed = world.config.settings.bandwidth_bytes_per_s or 1e9
    # A tenth of a second at full speed, within what a slow or a huge link makes sensible.
    numel = int(min(max(speed * 0.1, 1e6), 64e6)) // 4
    buffer = torch.zeros(numel, device=world.device)
    times = []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(buffer)
        world.synchronize()
        times.append(time.perf_counter() - start)
    return 2 * 4 * numel * (ranks - 1) / ranks / statistics.median(times[1:])


def _elapsed_ms(clock: Clock, marks: list[Any]) -> list[float]:
    """From the first mark to each of the others."""
    clock.settle()
    start, *rest = marks
    return [clock.elapsed_ms(start, mark) for mark in rest]
