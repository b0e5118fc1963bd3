"""`python -m overlap race`: makes the link, starts the ranks on it, and shows who reached the target when."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path

from overlap._options import require_extra, whole_number
from overlap.bench import settings as bench
from overlap.bench.command import open_link, rank_environment
from overlap.bench.results import describe_machine
from overlap.errors import ConfigurationError
from overlap.launch import run_ranks
from overlap.race.contestants import contestants
from overlap.race.loading import load_task
from overlap.race.rank import Plan, run_rank
from overlap.race.results import Course, Results
from overlap.race.settings import TASKS, Settings

__all__ = ["BEGIN", "END", "add_arguments", "run"]

# What `--into` writes between.
BEGIN, END = "<!-- race: written by `overlap race --into` -->", "<!-- end of race -->"
_EXTRAS = {
    "digits": ("demo", "sklearn", "matplotlib"),
    "cifar": ("demo", "torchvision", "matplotlib"),
    "text": ("bench", "matplotlib"),
}
_RESULTS, _PICTURE = "race.json", "race.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `overlap race`."""
    parser.epilog = f"contestants: {', '.join(contestants())}"
    add = parser.add_argument
    add("--task", choices=tuple(TASKS), default="digits",
        help="digits and cifar: ResNet-18 to an accuracy; text: a Transformer to a loss")  # fmt: skip
    add("--data", metavar="PATH", help="for cifar the folder that has cifar-10-batches-py; for text any file, Python's "
        "documentation where left out")  # fmt: skip
    add("--ranks", type=whole_number(2, 64), default=2, help="processes, each a rank")
    add("--bandwidth", metavar="SPEED", help="of each rank's link, e.g. 100mbit; needs root on Linux")
    add("--contestants", type=_names, metavar="A,B,...", help="who races besides ddp; all if left out")
    add("--seeds", type=whole_number(1, 100), default=3, help="trainings of each contestant")
    add("--target", type=float, help=f"what is raced to {_by_task('target')}")
    add("--steps", type=whole_number(1, 10**7), help=f"of every training {_by_task('steps')}")
    add("--evaluate-every", type=whole_number(1, 10**7), metavar="STEPS",
        help=f"with the clock stopped {_by_task('evaluate_every')}")  # fmt: skip
    add("--batch-size", type=whole_number(4, 10**6), help=f"of all ranks together {_by_task('batch_size')}")
    add("--width", type=whole_number(4, 4096),
        help=f"first channels of ResNet-18, usually 64, or width of the Transformer {_by_task('width')}")  # fmt: skip
    add("--output", type=Path, default=Path("overlap-race"), metavar="DIR",
        help=f"where {_RESULTS} and {_PICTURE} are; what {_RESULTS} holds already is not trained again")  # fmt: skip
    add("--show", action="store_true", help=f"train nothing: print and draw what {_RESULTS} holds")
    add("--into", type=Path, metavar="FILE.md", help="write every table that is there into a document, between "
        f"`{BEGIN}` and `{END}`")  # fmt: skip
    # For the ranks that this command starts; not for users.
    add("--run-config", help=argparse.SUPPRESS)


def run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Races, or is one rank of a race."""
    if options.run_config is not None:
        return run_rank(options.run_config)
    require_extra(*_EXTRAS[options.task])
    if options.into is not None:
        _check_page(options.into)
    path = _results_path(options.output)
    raced: Course | None = None
    if not options.show:
        settings = Settings.of(**{entry.name: getattr(options, entry.name) for entry in fields(Settings)})
        code, raced = _race(settings, path)
        if code != 0:
            return code
    elif not path.exists():
        raise ConfigurationError(f"--show prints {path}, which does not exist: race first")
    _publish(Results.load(path), raced, options, path)
    return 0


def _race(settings: Settings, path: Path) -> tuple[int, Course]:
    """Trains what the results do not hold yet; returns the ranks' exit code, and what was raced on."""
    Results.load(path)  # Raises before anything is started.
    with tempfile.TemporaryDirectory(prefix="overlap-race-") as folder, ExitStack() as stack:
        world = bench.Settings(ranks=settings.ranks, bandwidth=settings.bandwidth, model="mlp", device="cpu")
        kind, link = open_link(world, stack)
        course = _course(settings, is_shaped=kind == "namespaces")
        results = Results.load(path)
        left = tuple(entry for entry in settings.entries if not results.is_done(course, *entry))
        if len(left) < len(settings.entries):
            _say(f"{len(settings.entries) - len(left)} of {len(settings.entries)} trainings are in {path} already")
        if not left:
            return 0, course
        config = bench.RunConfig(settings=world, variants=(), folder=folder, link=kind, deadline=time.time())
        plan = Plan(settings=settings, config=config, course=course, entries=left, results=str(path))
        code = run_ranks(
            ["race", "--run-config", str(plan.save())],
            settings.ranks,
            prefix=None if link is None else link.prefix,
            env=lambda rank: rank_environment(world, link, rank),
        )
        return code, course


def _course(settings: Settings, *, is_shaped: bool) -> Course:
    task = load_task(settings)
    machine = describe_machine()
    return Course(
        task=settings.task,
        data=task.data,
        model=task.model,
        parameters=sum(parameter.numel() for parameter in task.make_model().parameters()),
        ranks=settings.ranks,
        bandwidth=settings.bandwidth if is_shaped else None,
        batch_size=settings.batch_size,
        steps=settings.steps,
        evaluate_every=settings.evaluate_every,
        machine=f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}",
    )


def _publish(results: Results, raced: Course | None, options: argparse.Namespace, path: Path) -> None:
    """Prints and draws what was raced, or all there is where nothing was; a document gets all there is."""
    from overlap.race.picture import save_picture
    from overlap.race.table import markdown, terminal

    everything = {course: cells for course, cells in results.courses.items() if cells}
    targets = {course: _target(course, options) for course in everything}
    shown = everything if raced is None else {raced: everything[raced]}
    print("\n\n".join(terminal(course, cells, targets[course]) for course, cells in shown.items()))
    picture = path.with_name(_PICTURE)
    save_picture(shown, targets, picture)
    print(f"\nCurves: {picture}\nResults: {path}", flush=True)
    if options.into is not None:
        tables = (markdown(course, cells, targets[course]) for course, cells in everything.items())
        before, _, rest = options.into.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        options.into.write_text("\n\n".join([before + BEGIN, *tables, END + after]))


def _target(course: Course, options: argparse.Namespace) -> float:
    """The target of the command line is for its own task."""
    if options.target is not None and course.task == options.task:
        return float(options.target)
    return TASKS[course.task].target


def _results_path(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--output is {str(folder)!r}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigurationError(f"--output is {str(folder)!r}, which cannot be written to: give another folder")
    return (folder / _RESULTS).resolve()


def _check_page(page: Path) -> None:
    text = page.read_text() if page.is_file() else ""
    if BEGIN not in text or END not in text.partition(BEGIN)[2]:
        raise ConfigurationError(f"--into is {str(page)!r}, which has no lines {BEGIN!r} and {END!r} to write between")


def _by_task(name: str) -> str:
    return f"({', '.join(f'{getattr(defaults, name):g} for {task}' for task, defaults in TASKS.items())})"


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _say(text: str) -> None:
    print(f"overlap: {text}", file=sys.stderr, flush=True)
