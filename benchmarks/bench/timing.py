"""A rank's work in a benchmark: one variant alone in a process, and then all of them in turns."""

from __future__ import annotations

import random
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.bench.variants import OPTIMIZERS, TrainingLoop, TrainingSetup, Variant, registry
from benchmarks.measuring import Counting, MemoryMeter, available_bytes, describe_machine, sent_bytes_counter
from benchmarks.ranks import World
from overlap.timeline.recording import Clock, clock_for

_COUNTED_STEPS = 2
_PROFILED_STEPS = 3
# A step on a GPU is too short to be timed between two barriers by itself.
_CUDA_BLOCKS = 10
# Taken even when time is up: quartiles of fewer would mean nothing.
_LEAST_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """One step without communication, as recorded by a hook that only reads the clock; times from its start."""

    compute_ms: float
    # When each bucket's last gradient was there, in the order that DDP issues them.
    ready_ms: tuple[float, ...]
    bucket_bytes: tuple[int, ...]
    # A whole update, by optimizer.
    update_ms: dict[str, float]

    def scaled_to(self, compute_ms: float) -> StepProfile:
        """The same step at another speed of the machine: profile and timing may see it differently loaded."""
        factor = compute_ms / self.compute_ms
        return replace(
            self,
            compute_ms=compute_ms,
            ready_ms=tuple(ready * factor for ready in self.ready_ms),
            update_ms={name: update * factor for name, update in self.update_ms.items()},
        )


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A rank's measurements of the model itself, of the link, and of the machine."""

    step: StepProfile
    memory_limit_bytes: int
    # Of an all-reduce on the link, by the bytes that each rank sends.
    link_bytes_per_s: float
    machine: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A rank's measurements of one variant that runs alone."""

    sent_bytes_per_step: float
    peak_memory_bytes: int


@dataclass(kw_only=True)
class Measurements:
    """The results of all ranks; lists are by rank. A variant is in `trials`, and then timed, or in `failures`."""

    profiles: list[ModelProfile]
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    # For each group of variants timed together, samples by variant: of each block, the time of its slowest rank.
    timings: list[dict[str, list[float]]] = field(default_factory=list)

    def timing_of(self, name: str) -> dict[str, list[float]] | None:
        """The group that counts for variant `name`: a baseline may be in several, and counts in the largest."""
        return max((samples for samples in self.timings if name in samples), key=len, default=None)


def try_variant(world: World, settings: Namespace, name: str) -> Trial:
    """Runs a variant for a few steps."""
    one = registry()[name]
    meter = MemoryMeter(world.device)
    loop = _built(world, settings, one)
    sent_bytes = sent_bytes_counter(world.network.kind)
    steps = one.block_steps if one.block_steps > 1 else _COUNTED_STEPS
    warmup_steps = max(settings.warmup_steps, one.block_steps)
    with loop.block(warmup_steps + steps):
        for _ in range(warmup_steps):
            loop.step()
        loop.finish()
        world.synchronize()
        # A rank may be done while its last packets wait to leave: only when every rank is here is all of it sent.
        world.meet()
        before_bytes = sent_bytes()
        # Such a link has neither an interface nor sockets of ours to look at.
        with Counting() if world.network.kind == "direct" else nullcontext():
            for _ in range(steps):
                loop.step()
            loop.finish()
        world.synchronize()
        world.meet()
        sent = sent_bytes() - before_bytes
        world.meet()
    return Trial(sent_bytes_per_step=sent / steps, peak_memory_bytes=meter.peak_bytes())


def _built(world: World, settings: Namespace, one: Variant) -> TrainingLoop:
    return one.build(TrainingSetup(settings=settings, device=world.device, optimizer_name=one.optimizer_name(settings)))


def profile_model(world: World, settings: Namespace) -> ModelProfile:
    """Measures the model without communication, and the link without the model."""
    limit_bytes = available_bytes(world.device, world.network.ranks)
    return ModelProfile(
        machine=describe_machine(),
        step=_profile_step(world, settings),
        memory_limit_bytes=limit_bytes,
        link_bytes_per_s=_link_speed(world),
    )


def _profile_step(world: World, settings: Namespace) -> StepProfile:
    setup = TrainingSetup(settings=settings, device=world.device, optimizer_name=settings.optimizer)
    ddp = setup.ddp()
    clock = clock_for(world.device)
    marks: list[Any] = []
    bucket_bytes: list[int] = []

    def record(state: object, bucket: Any) -> Any:
        marks.append(clock.now())
        bucket_bytes.append(bucket.buffer().nbytes)
        devices = [world.device] if world.device.type == "cuda" else None
        done: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        done.set_result(bucket.buffer())
        return done

    # DDP compares annotations with the types themselves, and here they are strings.
    record.__annotations__.clear()
    ddp.register_comm_hook(None, record)
    steps: list[list[float]] = []
    for _ in range(settings.warmup_steps + _PROFILED_STEPS):
        world.meet()
        bucket_bytes.clear()
        ddp.zero_grad()
        world.synchronize()
        marks[:] = [clock.now()]
        setup.loss(ddp).backward()
        marks.append(clock.now())
        steps.append(_elapsed_ms(clock, marks))
    middle = [statistics.median(times) for times in zip(*steps[-_PROFILED_STEPS:], strict=True)]
    update_ms = {}
    for name, make in OPTIMIZERS.items():
        optimizer = make(ddp.parameters())
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


def _elapsed_ms(clock: Clock, marks: list[Any]) -> list[float]:
    """From the first mark to each of the others."""
    clock.settle()
    start, *rest = marks
    return [clock.elapsed_ms(start, mark) for mark in rest]


def _link_speed(world: World) -> float:
    """Bytes per second that an all-reduce of a few megabytes gets out of the link."""
    ranks = world.network.ranks
    speed = world.network.bandwidth_bytes_per_s or 1e9
    # A tenth of a second at full speed, within sensible sizes for a slow or a huge link.
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


@dataclass(frozen=True)
class _Timed:
    variant: Variant
    loop: TrainingLoop
    steps: int


def time_variants(world: World, settings: Namespace, names: tuple[str, ...], until: float) -> dict[str, list[float]]:
    """Times variants against each other until Unix time `until`; returns each one's samples in ms per step."""
    ready = []
    for name in names:
        world.begin(name)
        ready.append(_warmed_up(world, settings, registry()[name]))
    samples: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(settings.seed)
    for number in range(settings.steps):
        start = time.time()
        # The same shuffle on every rank: which variant follows which changes from round to round.
        for timed in order.sample(ready, len(ready)):
            world.begin(timed.variant.name)
            samples[timed.variant.name].append(_block_ms(world, timed))
        more = _time_for_more(world, until, round_s=time.time() - start)
        if number + 1 >= _LEAST_ROUNDS and not more:
            break
    return samples


def _warmed_up(world: World, settings: Namespace, one: Variant) -> _Timed:
    loop = _built(world, settings, one)
    with loop.block(settings.warmup_steps):
        for _ in range(settings.warmup_steps):
            loop.step()
        loop.finish()
    return _Timed(one, loop, one.block_steps * (_CUDA_BLOCKS if world.device.type == "cuda" else 1))


def _block_ms(world: World, timed: _Timed) -> float:
    """One sample: a block of steps, divided by their number. Every rank starts from a barrier."""
    loop, lead_in_steps = timed.loop, timed.variant.lead_in_steps
    with loop.block(lead_in_steps + timed.steps):
        dist.barrier()
        _repeat(lead_in_steps, loop.step)
        world.synchronize()
        start = time.perf_counter()
        _repeat(timed.steps, loop.step)
        if not lead_in_steps:
            loop.finish()
        world.synchronize()
        elapsed_s = time.perf_counter() - start
        loop.finish()
    return 1000 * elapsed_s / timed.steps


def _repeat(times: int, step: Callable[[], None]) -> None:
    for _ in range(times):
        step()


def _time_for_more(world: World, until: float, *, round_s: float) -> bool:
    """Rank 0 looks at the clock for all: one that stopped alone would leave the others waiting."""
    verdict = torch.tensor([float(time.time() + round_s < until)], device=world.device)
    dist.broadcast(verdict, src=0)
    return bool(verdict.item())
