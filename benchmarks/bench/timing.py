"""One variant alone in a process, and then all of them in turns: what is sent, kept and how long it takes."""

from __future__ import annotations

import pickle
import random
import statistics
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from benchmarks.bench.settings import OPTIMIZERS, RunConfig, Settings
from benchmarks.bench.variants import TrainingLoop, Variant, registry, with_baselines
from benchmarks.bench.world import BenchWorld, open_world
from benchmarks.measuring import MemoryMeter, available_bytes, counting, sent_bytes_counter
from overlap.timeline.clock import Clock, clock_for


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """One step without communication, as recorded by a hook that only reads the clock; times from its start."""

    compute_ms: float
    # When each bucket's last gradient was there, in the order that DDP issues them.
    ready_ms: tuple[float, ...]
    bucket_bytes: tuple[int, ...]
    # A whole update, by optimizer.
    update_ms: dict[str, float]

    def __post_init__(self) -> None:
        if len(self.ready_ms) != len(self.bucket_bytes) or not self.ready_ms:
            raise ValueError(
                f"ready_ms has {len(self.ready_ms)} entries and bucket_bytes {len(self.bucket_bytes)}: "
                "one each per bucket, at least one"
            )

    def scaled_to(self, compute_ms: float) -> StepProfile:
        """The same step at another speed of the machine: profile and timing may see it differently loaded."""
        factor = compute_ms / self.compute_ms
        return replace(
            self,
            compute_ms=compute_ms,
            ready_ms=tuple(ready * factor for ready in self.ready_ms),
            update_ms={name: update * factor for name, update in self.update_ms.items()},
        )


_FILE = "measurements.pickle"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What one rank saw of one variant."""

    sent_bytes_per_step: float
    peak_memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """What one rank saw of the model itself, and of the link."""

    step: StepProfile
    memory_limit_bytes: int
    # Of an all-reduce on the link, by the bytes that each rank sends.
    link_bytes_per_s: float


@dataclass(kw_only=True)
class Measurements:
    """Lists are by rank; a variant is in `trials`, and then timed, or in `failures`."""

    profiles: list[ModelProfile] = field(default_factory=list)
    trials: dict[str, list[Trial]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    # For each group of variants timed together, samples by variant: of each block, the time of its slowest rank.
    timings: list[dict[str, list[float]]] = field(default_factory=list)

    def save(self, folder: str) -> None:
        (Path(folder) / _FILE).write_bytes(pickle.dumps(self))

    @classmethod
    def load(cls, folder: str) -> Measurements:
        measurements: Measurements = pickle.loads((Path(folder) / _FILE).read_bytes())
        return measurements

    def timing_of(self, name: str) -> dict[str, list[float]] | None:
        """The group that counts for variant `name`: a baseline may be in several, and counts in the largest."""
        return max((samples for samples in self.timings if name in samples), key=len, default=None)


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


# A step on a GPU is too short to be timed between two barriers by itself.
_CUDA_BLOCKS = 10
# Of the memory that is free when the run begins.
_USABLE = 0.7
# Taken even when time is up: quartiles of fewer would mean nothing.
_LEAST_ROUNDS = 3


@dataclass(frozen=True)
class _Timed:
    variant: Variant
    loop: TrainingLoop
    steps: int


def time_variants(
    config: RunConfig, rank: int, group_name: str, names: tuple[str, ...], until: float, terminal: IO[str]
) -> Any:
    """Times `names` against each other until Unix time `until`; returns each one's samples in ms per step.

    The name of the variant that is running is kept in a file (`running_variant_path`), so that the parent can tell
    which one took this process down.
    """
    running = running_variant_path(config, rank)
    known = registry()
    with open_world(config, rank, group_name) as world:
        ready = []
        for name in names:
            running.write_text(name)
            ready.append(_warmed_up(world, known[name]))
        samples: dict[str, list[float]] = {name: [] for name in names}
        order = random.Random(config.settings.seed)
        rounds = range(config.settings.steps)
        for number in tqdm(rounds, desc="timing", unit="round", file=terminal, disable=rank != 0, leave=False):
            start = time.time()
            # The same shuffle on every rank: which variant follows which changes from round to round.
            for timed in order.sample(ready, len(ready)):
                running.write_text(timed.variant.name)
                samples[timed.variant.name].append(_block_ms(world, timed))
            more = _time_for_more(world, until, round_s=time.time() - start)
            if number + 1 >= _LEAST_ROUNDS and not more:
                break
        return samples


def running_variant_path(config: RunConfig, rank: int) -> Path:
    """The file with the name of the variant that rank `rank` is timing."""
    return Path(config.folder) / f"running.{rank}"


def timing_groups(memory_bytes: Mapping[str, int], limit_bytes: int, settings: Settings) -> list[tuple[str, ...]]:
    """Splits the variants into as few groups as memory allows; each has the baselines that it needs.

    `memory_bytes` is each variant's peak by itself, which is more than it keeps between its turns. A variant that is
    `timed_alone` has a group of its own, before the others, which then get the time that it saves by crashing.
    """

    def group_of(*names: str) -> tuple[str, ...]:
        half = [registry()[name].baseline_16bit_name(settings) for name in names]
        return tuple(name for name in with_baselines([*names, *half], settings) if name in memory_bytes)

    alone = [name for name in memory_bytes if registry()[name].timed_alone]
    groups: list[tuple[str, ...]] = []
    current: tuple[str, ...] = ()
    for name in (name for name in memory_bytes if name not in alone):
        grown = group_of(*current, name)
        if current and sum(memory_bytes[each] for each in grown) > limit_bytes * _USABLE:
            groups.append(current)
            grown = group_of(name)
        current = grown
    if current:
        groups.append(current)
    return [group_of(name) for name in alone] + groups


def _warmed_up(world: BenchWorld, variant: Variant) -> _Timed:
    loop = variant.build(world.training_setup(variant.optimizer))
    with loop.block(world.config.settings.warmup_steps):
        for _ in range(world.config.settings.warmup_steps):
            loop.step()
        loop.finish()
    steps = variant.block_steps * (_CUDA_BLOCKS if world.device.type == "cuda" else 1)
    return _Timed(variant, loop, steps)


def _block_ms(world: BenchWorld, timed: _Timed) -> float:
    """One sample: a block of steps, divided by their number. Every rank starts from a barrier."""
    loop, lead_in_steps = timed.loop, timed.variant.lead_in_steps
    with loop.block(lead_in_steps + timed.steps):
        dist.barrier()
        for _ in range(lead_in_steps):
            loop.step()
        world.synchronize()
        start = time.perf_counter()
        for _ in range(timed.steps):
            loop.step()
        if not lead_in_steps:
            loop.finish()
        world.synchronize()
        elapsed_s = time.perf_counter() - start
        loop.finish()
    return 1000 * elapsed_s / timed.steps


def _time_for_more(world: BenchWorld, until: float, *, round_s: float) -> bool:
    """Rank 0 looks at the clock for all: one that stopped alone would leave the others waiting."""
    verdict = torch.tensor([float(time.time() + round_s < until)], device=world.device)
    dist.broadcast(verdict, src=0)
    return bool(verdict.item())
