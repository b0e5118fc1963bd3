"""One variant alone in a process: does it run at all, what does it send, and how much memory does it take?"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from overlap.bench.floor import StepProfile
from overlap.bench.memory import MemoryMeter, available_bytes
from overlap.bench.registry import registry
from overlap.bench.settings import OPTIMIZERS, RunConfig
from overlap.bench.wire import sent_bytes_counter
from overlap.bench.world import BenchWorld, open_world

PROFILE = "profile"
_COUNTED_STEPS = 2
_PROFILED_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one rank saw of one variant."""

    sent_bytes_per_step: float
    peak_memory_bytes: int
    # Rough: a few steps, one after the other, with nothing to compare to.
    step_ms: float


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """What one rank saw of the model itself, and of the link."""

    step: StepProfile
    memory_limit_bytes: int
    # Of an all-reduce on the link, by the bytes that each rank sends.
    link_bytes_per_s: float

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> ModelProfile:
        step = raw["step"]
        return cls(
            step=StepProfile(
                compute_ms=step["compute_ms"],
                ready_ms=tuple(step["ready_ms"]),
                bucket_bytes=tuple(step["bucket_bytes"]),
                update_ms=step["update_ms"],
            ),
            memory_limit_bytes=raw["memory_limit_bytes"],
            link_bytes_per_s=raw["link_bytes_per_s"],
        )


def try_variant(config: RunConfig, rank: int, name: str) -> dict[str, Any]:
    """Runs variant `name` for a few steps; meant for a process of its own, which it may crash."""
    one = registry()[name]
    with open_world(config, rank, name, count=True) as world:
        meter = MemoryMeter(world.device)
        loop = one.build(world.training_setup())
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
            before_bytes, start = sent_bytes(), time.perf_counter()
            for _ in range(steps):
                loop.step()
            loop.finish()
            world.synchronize()
            step_ms = 1000 * (time.perf_counter() - start) / steps
            world.wait_for_ranks("counted")
            sent = sent_bytes() - before_bytes
            world.wait_for_ranks("read")
        return asdict(Trial(sent_bytes_per_step=sent / steps, peak_memory_bytes=meter.peak_bytes(), step_ms=step_ms))


def profile_model(config: RunConfig, rank: int) -> dict[str, Any]:
    """Measures the model without communication, and the link without the model."""
    with open_world(config, rank, PROFILE) as world:
        limit_bytes = available_bytes(world.device, config.processes)
        step = _profile_step(world)
        return asdict(ModelProfile(step=step, memory_limit_bytes=limit_bytes, link_bytes_per_s=_link_speed(world)))


def _profile_step(world: BenchWorld) -> StepProfile:
    setup = world.training_setup()
    ddp = setup.ddp()
    clock = _Clock(world.device)
    bucket_bytes: list[int] = []

    def record(state: object, bucket: Any) -> Any:
        clock.mark()
        bucket_bytes.append(bucket.buffer().numel() * bucket.buffer().element_size())
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
        clock.start()
        setup.loss(ddp).backward()
        clock.mark()
        steps.append(clock.read_ms())
    middle = [statistics.median(times) for times in zip(*steps[-_PROFILED_STEPS:], strict=True)]
    update_ms = {}
    for name in OPTIMIZERS:
        optimizer = setup.optimizer(name, ddp.parameters())
        # The first step creates the state.
        optimizer.step()
        clock.start()
        for _ in range(_PROFILED_STEPS):
            optimizer.step()
        clock.mark()
        update_ms[name] = clock.read_ms()[0] / _PROFILED_STEPS
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


class _Clock:
    """Times from `start()` to each `mark()`, by the device's own events on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._marks: list[Any] = []

    def start(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)
        self._marks = [self._now()]

    def mark(self) -> None:
        self._marks.append(self._now())

    def read_ms(self) -> list[float]:
        first, *rest = self._marks
        if not self._cuda:
            return [1000 * (mark - first) for mark in rest]
        torch.cuda.synchronize(self._device)
        return [first.elapsed_time(mark) for mark in rest]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
