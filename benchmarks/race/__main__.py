"""`python -m benchmarks.race`: makes the link, starts the ranks on it, and shows who reached the target when."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.bench import settings as bench
from benchmarks.bench.__main__ import open_link, rank_environment
from benchmarks.launch import run_ranks
from benchmarks.measuring import describe_machine
from benchmarks.race.contest import CONTESTANTS, Plan, load_task, run_rank
from benchmarks.race.results import Course, Results, markdown, save_picture, terminal
from overlap.errors import ConfigurationError

__all__ = ["BEGIN", "END", "main"]

# What `--into` writes between.
BEGIN, END = "<!-- race: written by `python -m benchmarks.race --into` -->", "<!-- end of race -->"
# The schedule needs a step in its first fifth.
_LEAST_STEPS = 8
# What a task takes where the options say nothing; small enough for two cores and a slow link.
_TASKS = {
    "digits": {"steps": 96, "width": 16, "target": 0.95},
    "text": {"steps": 128, "width": 128, "target": 2.4},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Races, or is one rank of a race."""
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
    add("--output", type=Path, default=Path("overlap-race"), metavar="DIR",
        help="where race.json and race.png are; what race.json holds already is not trained again")  # fmt: skip
    add("--show", action="store_true", help="train nothing: print and draw what race.json holds")
    add(
        "--into", type=Path, metavar="FILE.md", help=f"write every table into a document, between `{BEGIN}` and `{END}`"
    )
    # For the ranks that this command starts; not for users.
    add("--run-config", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.run_config is not None:
        return run_rank(options.run_config)
    try:
        return _run(options)
    except ConfigurationError as error:
        parser.error(str(error))


def _run(options: argparse.Namespace) -> int:
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
    raced: Course | None = None
    if not options.show:
        code, raced = _race(options, path)
        if code != 0:
            return code
    _publish(Results.load(path), raced, options, path)
    return 0


def _race(options: argparse.Namespace, path: Path) -> tuple[int, Course]:
    """Trains what the results do not hold yet; returns the ranks' exit code, and the course."""
    results = Results.load(path)
    names = [name for name in CONTESTANTS if name in {"ddp", *options.contestants}]
    with tempfile.TemporaryDirectory(prefix="overlap-race-") as folder, ExitStack() as stack:
        world = bench.Settings(ranks=options.ranks, bandwidth=options.bandwidth, model="mlp", device="cpu")
        kind, link = open_link(world, stack)
        course = _course(options, is_shaped=kind == "namespaces")
        # All train with one seed before any does with the next, each time beginning with another, so that a change in
        # the machine's load falls on all.
        entries = [
            (names[(place + seed) % len(names)], seed) for seed in range(options.seeds) for place in range(len(names))
        ]
        left = tuple(entry for entry in entries if not results.is_done(course, *entry))
        if not left:
            return 0, course
        config = bench.RunConfig(settings=world, variants=(), folder=folder, link=kind, deadline=time.time())
        plan = Plan(course=course, config=config, entries=left, results=str(path))
        code = run_ranks(
            ["benchmarks.race", "--run-config", str(plan.save())],
            options.ranks,
            prefix=None if link is None else link.prefix,
            env=lambda rank: rank_environment(world, link, rank),
        )
        return code, course


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
    )


def _publish(results: Results, raced: Course | None, options: argparse.Namespace, path: Path) -> None:
    """Prints and draws the course of this race, or all there are after `--show`; a document gets all there are."""
    targets = {
        # The target of the command line is for its own task.
        course: options.target if options.target and course.task == options.task else _TASKS[course.task]["target"]
        for course in results.courses
    }
    shown = results.courses if raced is None else {raced: results.courses[raced]}
    if not shown:
        raise ConfigurationError(f"{path} holds no results: race first")
    print("\n\n".join(terminal(course, cells, targets[course]) for course, cells in shown.items()))
    picture = path.with_suffix(".png")
    save_picture(shown, targets, picture)
    print(f"\nCurves: {picture}\nResults: {path}", flush=True)
    if options.into is not None:
        tables = (markdown(course, cells, targets[course]) for course, cells in results.courses.items())
        before, _, rest = options.into.read_text().partition(BEGIN)
        options.into.write_text("\n\n".join([before + BEGIN, *tables, END + rest.partition(END)[2]]))


if __name__ == "__main__":
    sys.exit(main())
