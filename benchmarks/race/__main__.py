"""`python -m benchmarks.race`: trains the contestants on a link, and shows who reached the target when."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.measuring import describe_machine
from benchmarks.pages import write_between
from benchmarks.race.contest import CONTESTANTS, race
from benchmarks.race.results import Course, Results
from benchmarks.race.tables import markdown, terminal
from benchmarks.race.tasks import load_task
from benchmarks.ranks import open_network
from overlap.errors import ConfigurationError

# Around the tables that `--into` writes.
BEGIN, END = "<!-- race: written by `python -m benchmarks.race --into` -->", "<!-- end of race -->"
# The schedule needs a step in its first fifth.
_LEAST_STEPS = 8
# The defaults of a task; small enough for two cores and a slow link.
_TASKS = {
    "digits": {"steps": 96, "width": 16, "target": 0.95},
    "text": {"steps": 128, "width": 128, "target": 2.4},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Races, and shows the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race", description="Trains to a target on a link.",
                                     epilog=f"contestants: {', '.join(CONTESTANTS)}")  # fmt: skip
    add = parser.add_argument
    add("--task", choices=tuple(_TASKS), default="digits",
        help="digits: ResNet-18 to an accuracy; text: a Transformer to a loss on Python's documentation")  # fmt: skip
    add("--ranks", type=int, default=2, help="processes, each a rank")
    add("--bandwidth", metavar="SPEED", help="of each rank's link, e.g. 100mbit; needs root on Linux")
    add("--contestants", type=lambda text: text.split(","), metavar="A,B,...", default=list(CONTESTANTS),
        help="who races besides ddp; all if left out")  # fmt: skip
    add("--seeds", type=int, default=3, help="trainings of each contestant")
    add("--target", type=float, help="accuracy or loss (0.95 for digits, 2.4 for text)")
    add("--steps", type=int, help="of every training (96 for digits, 128 for text)")
    add("--evaluate-every", type=int, default=8, metavar="STEPS", help="with the clock stopped")
    add("--batch-size", type=int, default=64, help="of all ranks together")
    add("--width", type=int, help="first channels of ResNet-18 (16, usually 64), or width of the Transformer (128)")
    add("--learning-rate", type=float, help="the highest of the schedule (0.05 for digits, 5e-3 for text)")
    add("--output", type=Path, default=Path("overlap-race"), metavar="DIR",
        help="for race.json; trainings that it holds are not repeated")  # fmt: skip
    add("--show", action="store_true", help="train nothing: print race.json")
    add("--into", type=Path, metavar="FILE.md", help="write every table into a document, between two comments there")
    options = parser.parse_args(argv)
    try:
        _run(options)
    except ConfigurationError as error:
        parser.error(str(error))
    return 0


def _run(options: argparse.Namespace) -> None:
    for name in ("steps", "width"):
        if getattr(options, name) is None:
            setattr(options, name, _TASKS[options.task][name])
    unknown = set(options.contestants) - set(CONTESTANTS)
    if unknown:
        raise ConfigurationError(f"contestants has {', '.join(sorted(unknown))}; known are {', '.join(CONTESTANTS)}")
    if options.batch_size % options.ranks or options.batch_size < 2 * options.ranks:
        raise ConfigurationError(
            f"--batch-size {options.batch_size} is of all ranks together: give a multiple of --ranks {options.ranks}, "
            "two samples a rank at least"
        )
    least = max(_LEAST_STEPS, options.evaluate_every)
    if options.steps < least:
        raise ConfigurationError(f"--steps {options.steps} is too few: give at least {least}")
    options.output.mkdir(parents=True, exist_ok=True)
    path = (options.output / "race.json").resolve()
    results = Results(path)
    shown = list(results.courses) if options.show else [_race(options, results)]
    if not shown:
        raise ConfigurationError(f"{path} holds no results: race first")
    targets = {
        # The target of the command line is for its own task.
        course: options.target if options.target and course.task == options.task else _TASKS[course.task]["target"]
        for course in results.courses
    }
    print("\n\n".join(terminal(course, results.courses[course], targets[course]) for course in shown))
    print(f"\nResults: {path}", flush=True)
    if options.into is not None:
        tables = (markdown(course, cells, targets[course]) for course, cells in results.courses.items())
        write_between(options.into, BEGIN, END, "\n\n".join(tables))


def _race(options: argparse.Namespace, results: Results) -> Course:
    """Trains all that the results do not hold yet."""
    names = [name for name in CONTESTANTS if name in {"ddp", *options.contestants}]
    # All train with one seed before any does with the next, each time beginning with another, so that a change in the
    # machine's load falls on all.
    entries = [
        (names[(place + seed) % len(names)], seed) for seed in range(options.seeds) for place in range(len(names))
    ]
    with open_network(options.ranks, bandwidth=options.bandwidth) as network:
        course = _course(options, is_shaped=network.kind == "namespaces")
        for number, (name, seed) in enumerate(entries, 1):
            if not results.is_done(course, name, seed):
                print(f"{number} of {len(entries)}: seed {seed}, {name}", file=sys.stderr, flush=True)
                results.add(course, race(network, course, name, seed, load=round(os.getloadavg()[0], 2)))
    return course


def _course(options: argparse.Namespace, *, is_shaped: bool) -> Course:
    task = load_task(options.task, width=options.width, batch_size=options.batch_size)
    machine = describe_machine()
    return Course(
        task=options.task,
        data=task.data,
        model=task.model,
        parameters=sum(parameter.numel() for parameter in task.make_model().parameters()),
        width=options.width,
        ranks=options.ranks,
        bandwidth=options.bandwidth if is_shaped else None,
        batch_size=options.batch_size,
        steps=options.steps,
        evaluate_every=options.evaluate_every,
        machine=f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}",
        learning_rate=options.learning_rate,
    )


if __name__ == "__main__":
    sys.exit(main())
