"""A plain and an overlapped step of the demo's model, recorded, as a picture.

    python -m benchmarks.trace [--bandwidth 1gbit] [options of the demo]

`--bandwidth` sets the speed of each rank's link, which takes root on Linux.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.ranks import World, open_network, run_on_ranks
from overlap.demo import (
    TRAIN_IMAGES,
    Digits,
    Run,
    Settings,
    add_arguments,
    batches_of_epoch,
    load_digits,
    start_runs,
)
from overlap.errors import ConfigurationError
from overlap.timeline import Report, StepReport, Timeline, save_reports

# DDP rebuilds its buckets after the first step, and optimizers create their state in it.
_WARMUP_STEPS = 3
# The two ways take turns, so that a change in the machine's load falls on both.
_STEPS_PER_TURN = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Records on every rank, saves `step.png`, and prints them as tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace", description=__doc__, conflict_handler="resolve",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add_arguments(parser)
    parser.add_argument("--steps", type=int, default=8, help="steps to record of each way to train")
    parser.add_argument("--bandwidth", metavar="SPEED", help="of each rank's link, e.g. 1gbit")
    parser.add_argument("--output", type=Path, default=Path("overlap-trace"), metavar="DIR",
                        help="where step.png is saved")  # fmt: skip
    values = vars(parser.parse_args(argv))
    steps, bandwidth, ranks = values.pop("steps"), values.pop("bandwidth"), values.pop("ranks", 2)
    try:
        # As many epochs as any number of steps can need.
        settings = Settings(**{**values, "epochs": TRAIN_IMAGES})
        settings.steps_per_epoch(ranks)
        has_gpus = settings.device != "cpu" and torch.cuda.device_count() >= ranks
        with open_network(ranks, bandwidth=bandwidth, device="cuda" if has_gpus else "cpu") as network:
            reports: dict[str, Report] = run_on_ranks(network, _record, settings, steps)[0]
    except ConfigurationError as error:
        parser.error(str(error))
    settings.output.mkdir(parents=True, exist_ok=True)
    picture = settings.output / "step.png"
    save_reports(reports, picture)
    for title, report in reports.items():
        print(f"\n{title}\n{report}")
    print(f"\nPicture: {picture}", flush=True)
    return 0


def _record(world: World, settings: Settings, steps: int) -> dict[str, Report]:
    """Trains in both ways; returns the recording of each by its title."""
    digits = load_digits(image_size=settings.image_size, images=settings.images, device=world.device)
    runs = start_runs(settings, world.device)
    batches = [_endless_batches(digits, settings) for _ in runs]
    for run, own in zip(runs, batches, strict=True):
        _train(run, itertools.islice(own, _WARMUP_STEPS))
    turns: list[list[Report]] = [[] for _ in runs]
    for start in range(0, steps, _STEPS_PER_TURN):
        for run, own, reports in zip(runs, batches, turns, strict=True):
            with Timeline(run.ddp) as timeline:
                _train(run, itertools.islice(own, min(_STEPS_PER_TURN, steps - start)))
            reports.append(timeline.report())
    world.meet()
    titles = [f"{run.name}: {run.recipe.description}" for run in runs]
    return {title: joined(own) for title, own in zip(titles, turns, strict=True)}


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
        run.recipe.optimizer.zero_grad()
        cross_entropy(run.ddp(images), labels).backward()
        run.recipe.optimizer.step()


def _endless_batches(digits: Digits, settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    for epoch in itertools.count():
        yield from batches_of_epoch(digits, epoch, settings)


if __name__ == "__main__":
    sys.exit(main())
