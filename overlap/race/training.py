"""One rank trains one contestant, with a clock that runs while it trains and stops while it is evaluated."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR

from overlap.bench.settings import RunConfig
from overlap.bench.wire import sent_bytes_counter
from overlap.bench.world import BenchWorld, open_world, timeout_s
from overlap.race.contestants import Entrant, contestants
from overlap.race.settings import Settings
from overlap.race.task import Task

__all__ = ["Curve", "train"]


@dataclass(kw_only=True)
class Curve:
    """What came of one contestant with one seed; the first point is before the first step.

    ``seconds`` are of training alone, by the slowest rank of each round; ``metric`` is of rank 0's model, and None
    where it was not finite.
    """

    seconds: list[float] = field(default_factory=list)
    metric: list[float | None] = field(default_factory=list)
    # By this rank.
    sent_bytes: float = 0.0


def train(
    task: Task,
    settings: Settings,
    config: RunConfig,
    rank: int,
    name: str,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
) -> Curve:
    """Trains contestant ``name`` for all its steps; every rank calls it, and rank 0's curve has the metric.

    It trains in rounds of ``evaluate_every`` steps. Before a round all ranks meet, and each starts its clock; when its
    last step is done and nothing is left in flight it stops it. Then rank 0 evaluates its model while the others wait,
    with the clocks stopped, on the same schedule for every contestant. What ranks tell each other about that goes
    through files and is not counted as sent.
    """
    with open_world(config, rank, f"{name}-{seed}") as world:
        torch.manual_seed(seed)
        ddp = DistributedDataParallel(task.make_model())
        entrant = contestants()[name].enter(ddp, task.optimizer)
        schedule = OneCycleLR(
            entrant.optimizer,
            max_lr=task.optimizer.options["lr"],
            total_steps=settings.steps + 1,
            pct_start=0.2,
            cycle_momentum=False,
        )
        batches = task.batches(seed, rank, settings.ranks)
        sent_bytes = sent_bytes_counter(config.link)
        curve = Curve(seconds=[0.0], metric=[_evaluate(task, ddp.module) if rank == 0 else None])
        for start in range(0, settings.steps, settings.evaluate_every):
            steps = min(settings.evaluate_every, settings.steps - start)
            world.wait_for_ranks(f"start-{start}")
            before_bytes = sent_bytes()
            dist.barrier()
            began = clock()
            for inputs, targets in itertools.islice(batches, steps):
                _step(ddp, entrant, inputs, targets)
                schedule.step()
            entrant.settle()
            seconds = _slowest(world, f"end-{start}", clock() - began)
            # Every rank is done, so all that this one had to send has left.
            curve.sent_bytes += sent_bytes() - before_bytes
            curve.seconds.append(curve.seconds[-1] + seconds)
            curve.metric.append(_evaluate(task, ddp.module) if rank == 0 else None)
        # Not before rank 0 has evaluated: a group that is destroyed closes the others' connections.
        world.wait_for_ranks("all-evaluated")
    return curve


def _step(ddp: DistributedDataParallel, entrant: Entrant, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    if entrant.zero_grad:
        entrant.optimizer.zero_grad()
    cross_entropy(ddp(inputs), targets).backward()
    entrant.optimizer.step()


def _slowest(world: BenchWorld, label: str, seconds: float) -> float:
    """What the slowest rank took, on every rank."""
    taken: list[float] = world.files.exchange(f"{world.name}-{label}", seconds, timeout_s=timeout_s(world.config))
    return max(taken)


def _evaluate(task: Task, model: nn.Module) -> float | None:
    model.eval()
    with torch.no_grad():
        value = task.evaluate(model)
    model.train()
    return value if math.isfinite(value) else None
