"""The timing: all variants in one process a rank, taking turns, so that a drifting machine favours none of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from tqdm import tqdm

from overlap.bench.registry import Variant, registry
from overlap.bench.settings import Plan
from overlap.bench.site import Prepared
from overlap.bench.world import World, join_world

# A step on a GPU is too short to be timed between two barriers by itself.
_CUDA_BLOCKS = 10
# Of the memory that is free when the run begins.
_USABLE = 0.7
# Taken even when time is up: quartiles of fewer would mean nothing.
_LEAST_ROUNDS = 3


@dataclass(frozen=True)
class _Racer:
    variant: Variant
    prepared: Prepared
    steps: int


def race(plan: Plan, rank: int, name: str, names: tuple[str, ...], until: float, terminal: IO[str]) -> Any:
    """Times `names` against each other until Unix time `until`; returns each one's samples in ms a step.

    Before a variant is touched, its name is written to `journal`, for whoever has to find out what took this
    process down.
    """
    journal = journal_path(plan, rank)
    known = registry()
    with join_world(plan, rank, name) as world:
        racers = []
        for each in names:
            journal.write_text(each)
            racers.append(_warmed_up(world, known[each]))
        samples: dict[str, list[float]] = {each: [] for each in names}
        order = random.Random(plan.settings.seed)
        rounds = tqdm(
            range(plan.settings.steps),
            desc="timing",
            unit="round",
            file=terminal,
            disable=rank != 0,
            leave=False,
        )
        for number in rounds:
            start = time.time()
            # The same shuffle on every rank: who comes after whom changes from round to round.
            for racer in order.sample(racers, len(racers)):
                journal.write_text(racer.variant.name)
                samples[racer.variant.name].append(_block_ms(world, racer))
            more = _time_for_more(world, until, round_s=time.time() - start)
            if number + 1 >= _LEAST_ROUNDS and not more:
                break
        return samples


def journal_path(plan: Plan, rank: int) -> Path:
    return Path(plan.folder) / f"journal.{rank}"


def plan_races(
    memory_bytes: Mapping[str, int],
    limit_bytes: int,
    with_baselines: Callable[[Iterable[str]], Iterable[str]],
    apart: Collection[str] = (),
) -> list[tuple[str, ...]]:
    """Splits the variants into as few races as memory allows; each has the baselines that it needs.

    `memory_bytes` is each variant's peak by itself, which is more than it keeps between its turns. Those in
    `apart` have a race each, before the others: the time that one saves by crashing is theirs.
    """
    usable = limit_bytes * _USABLE
    races: list[tuple[str, ...]] = []
    current: tuple[str, ...] = ()
    for name in (name for name in memory_bytes if name not in apart):
        grown = _running(with_baselines((*current, name)), memory_bytes)
        if current and sum(memory_bytes[each] for each in grown) > usable:
            races.append(current)
            grown = _running(with_baselines((name,)), memory_bytes)
        current = grown
    if current:
        races.append(current)
    return [_running(with_baselines((name,)), memory_bytes) for name in memory_bytes if name in apart] + races


def _running(names: Iterable[str], memory_bytes: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(name for name in names if name in memory_bytes)


def _warmed_up(world: World, variant: Variant) -> _Racer:
    prepared = variant.build(world.site())
    with prepared.running(world.plan.settings.warmup_steps):
        for _ in range(world.plan.settings.warmup_steps):
            prepared.step()
        prepared.finish()
    steps = variant.block_steps * (_CUDA_BLOCKS if world.device.type == "cuda" else 1)
    return _Racer(variant, prepared, steps)


def _block_ms(world: World, racer: _Racer) -> float:
    """One sample: a block of steps, divided by their number. Every rank starts from a barrier."""
    with racer.prepared.running(racer.variant.lead_in_steps + racer.steps):
        dist.barrier()
        for _ in range(racer.variant.lead_in_steps):
            racer.prepared.step()
        world.synchronize()
        start = time.perf_counter()
        for _ in range(racer.steps):
            racer.prepared.step()
        if not racer.variant.lead_in_steps:
            racer.prepared.finish()
        world.synchronize()
        elapsed_s = time.perf_counter() - start
        racer.prepared.finish()
    return 1000 * elapsed_s / racer.steps


def _time_for_more(world: World, until: float, *, round_s: float) -> bool:
    """Rank 0 looks at the clock for all: one that stopped alone would leave the others waiting."""
    verdict = torch.tensor([float(time.time() + round_s < until)], device=world.device)
    dist.broadcast(verdict, src=0)
    return bool(verdict.item())
