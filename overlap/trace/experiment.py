"""What every rank of a trace does: train a few steps each way, record them, save both in one picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from torch.nn.functional import cross_entropy

from overlap.demo.data import Digits, load_digits, shard
from overlap.demo.settings import Settings
from overlap.demo.train import Run, start_runs
from overlap.launch import World, init_ranks
from overlap.timeline import Report, StepReport, Timeline, save_reports

__all__ = ["joined", "run_experiment"]

# DDP rebuilds its buckets after the first step, and optimizers create their state in it.
_WARMUP_STEPS = 3
# The two ways take turns, so that a change in the machine's load falls on both.
_STEPS_PER_TURN = 4


def run_experiment(settings: Settings, *, steps: int, output: Path) -> int:
    """Trains in both ways, saves `step.png` and `step.json`, and prints what they show."""
    with init_ranks(settings.device) as world:
        digits = load_digits(image_size=settings.image_size, images=settings.images, device=world.device)
        runs = start_runs(settings, world)
        batches = [_batches(digits, settings, world) for _ in runs]
        for run, own in zip(runs, batches, strict=True):
            _train(run, itertools.islice(own, _WARMUP_STEPS))
        turns: list[list[Report]] = [[] for _ in runs]
        for start in range(0, steps, _STEPS_PER_TURN):
            for run, own, reports in zip(runs, batches, turns, strict=True):
                with Timeline(run.ddp) as timeline:
                    _train(run, itertools.islice(own, min(_STEPS_PER_TURN, steps - start)))
                reports.append(timeline.report())
        if world.is_main:
            titles = [f"{run.name}: {run.recipe.description}" for run in runs]
            _present({title: joined(own) for title, own in zip(titles, turns, strict=True)}, output)
    return 0


def joined(reports: Sequence[Report]) -> Report:
    """Recordings of one model one after the other, as if what lay between them had taken no time."""
    ranks: list[tuple[StepReport, ...]] = [() for _ in reports[0].ranks]
    end_ms = 0.0
    for report in reports:
        for rank, steps in enumerate(report.ranks):
            first = len(ranks[rank])
            ranks[rank] += tuple(
                replace(step, step=first + place, start_ms=end_ms + step.start_ms) for place, step in enumerate(steps)
            )
        end_ms = max(step.start_ms + step.step_ms for steps in ranks for step in steps)
    return Report(title=reports[0].title, ranks=tuple(ranks))


def _train(run: Run, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    for images, labels in batches:
        if run.recipe.zero_grad:
            run.recipe.optimizer.zero_grad()
        cross_entropy(run.ddp(images), labels).backward()
        run.recipe.optimizer.step()


def _batches(digits: Digits, settings: Settings, world: World) -> Iterator[tuple[Tensor, Tensor]]:
    for epoch in itertools.count():
        yield from shard(
            digits, epoch=epoch, seed=settings.seed, rank=world.rank, ranks=world.size, batch_size=settings.batch_size
        )


def _present(reports: dict[str, Report], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    picture, trace = output / "step.png", output / "step.json"
    save_reports(reports, picture)
    save_reports(reports, trace)
    for title, report in reports.items():
        print(f"\n{title}\n{report}")
    print(f"\nPicture: {picture}\nTrace, for ui.perfetto.dev or chrome://tracing: {trace}", flush=True)
