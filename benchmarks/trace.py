"""A plain and an overlapped step of the demo's model, recorded: a picture, and a trace for Perfetto.

    python -m benchmarks.trace [--bandwidth 1gbit] [options of the demo]

`--bandwidth` sets the speed of each rank's link, which takes root on Linux.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.launch import run_ranks
from benchmarks.link import LinkError, ShapedLink, parse_bandwidth
from overlap.demo.command import add_arguments
from overlap.demo.experiment import Digits, Run, batches_of_epoch, load_digits, process_group, start_runs
from overlap.demo.settings import TRAIN_IMAGES, Settings
from overlap.errors import ConfigurationError
from overlap.timeline import Report, StepReport, Timeline, save_reports

__all__ = ["joined", "main"]

# DDP rebuilds its buckets after the first step, and optimizers create their state in it.
_WARMUP_STEPS = 3
# The two ways take turns, so that a change in the machine's load falls on both.
_STEPS_PER_TURN = 4


def main(argv: Sequence[str] | None = None) -> int:
    """Starts the ranks, or is one of them."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace", description=__doc__, conflict_handler="resolve",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add_arguments(parser)
    parser.add_argument("--steps", type=int, default=8, help="steps to record of each way to train")
    parser.add_argument("--bandwidth", metavar="SPEED", help="of each rank's link, e.g. 1gbit")
    parser.add_argument("--output", type=Path, default=Path("overlap-trace"), metavar="DIR",
                        help="where step.png and step.json are saved")  # fmt: skip
    values = vars(parser.parse_args(argv))
    steps, bandwidth, ranks = values.pop("steps"), values.pop("bandwidth"), values.pop("ranks", 2)
    try:
        # As many epochs as any number of steps can need.
        settings = Settings(**{**values, "epochs": TRAIN_IMAGES})
        settings.steps_per_epoch(ranks)
        if "RANK" in os.environ:
            return _record(settings, steps)
        with ExitStack() as stack:
            link = None
            if bandwidth is not None:
                speed = parse_bandwidth(bandwidth)
                link = stack.enter_context(ShapedLink(ranks=ranks, bandwidth_bytes_per_s=speed))
            command = ["benchmarks.trace", *argv]
            return run_ranks(command, ranks, prefix=link and link.prefix, env=link and link.env)
    except (ConfigurationError, LinkError) as error:
        parser.error(str(error))


def _record(settings: Settings, steps: int) -> int:
    """Trains in both ways, saves `step.png` and `step.json`, and prints them as tables."""
    device = process_group(settings.device)
    digits = load_digits(image_size=settings.image_size, images=settings.images, device=device)
    runs = start_runs(settings, device)
    batches = [_endless_batches(digits, settings) for _ in runs]
    for run, own in zip(runs, batches, strict=True):
        _train(run, itertools.islice(own, _WARMUP_STEPS))
    turns: list[list[Report]] = [[] for _ in runs]
    for start in range(0, steps, _STEPS_PER_TURN):
        for run, own, reports in zip(runs, batches, turns, strict=True):
            with Timeline(run.ddp) as timeline:
                _train(run, itertools.islice(own, min(_STEPS_PER_TURN, steps - start)))
            reports.append(timeline.report())
    if dist.get_rank() == 0:
        titles = [f"{run.name}: {run.recipe.description}" for run in runs]
        _present({title: joined(own) for title, own in zip(titles, turns, strict=True)}, settings.output)
    dist.destroy_process_group()
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


def _endless_batches(digits: Digits, settings: Settings) -> Iterator[tuple[Tensor, Tensor]]:
    for epoch in itertools.count():
        yield from batches_of_epoch(digits, epoch, settings)


def _present(reports: dict[str, Report], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    picture, trace = output / "step.png", output / "step.json"
    save_reports(reports, picture)
    save_reports(reports, trace)
    for title, report in reports.items():
        print(f"\n{title}\n{report}")
    print(f"\nPicture: {picture}\nTrace, for ui.perfetto.dev or chrome://tracing: {trace}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
