"""The timing: variants take turns in one process per rank, so that a drifting machine favours none of them."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from overlap.bench.registry import registry, with_baselines
from overlap.bench.settings import RunConfig, Settings
from overlap.bench.training_setup import TrainingLoop
from overlap.bench.variant import Variant
from overlap.bench.world import BenchWorld, open_world

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
