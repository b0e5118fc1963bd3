"""The standings of a race, as a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.pages import in_columns, in_markdown
from benchmarks.race.contest import CONTESTANTS
from benchmarks.race.results import OK, Cell, Course

_BASELINE = "ddp"
# By the task's name: the metric, and whether more is better.
_METRICS = {"digits": ("accuracy", True), "text": ("loss", False)}


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One contestant over its seeds. Times are infinite where a seed never reached the target."""

    contestant: str
    # Of each seed that was trained, in their order.
    times_s: tuple[float, ...]
    # The median over seeds of the time over plain DDP's with the same seed; None where it is not finite.
    ratio: float | None
    # Steps to the target, the median over seeds.
    steps: float
    cells: tuple[Cell, ...]
    # The error, if a seed failed.
    failure: str | None

    @property
    def time_s(self) -> float:
        """The median, infinite where most seeds never reached the target."""
        return statistics.median(self.times_s) if self.times_s else math.inf


def standings(course: Course, cells: Sequence[Cell], target: float) -> list[Standing]:
    """A line for each contestant, in the order of the table, plain DDP first."""
    higher_is_better = _METRICS[course.task][1]

    def place(cell: Cell) -> int | None:
        """The first evaluation that reaches the target."""
        reached = (
            value is not None and (value >= target if higher_is_better else value <= target) for value in cell.metric
        )
        return next((place for place, is_there in enumerate(reached) if is_there), None)

    def time_s(cell: Cell) -> float:
        first = place(cell)
        return math.inf if first is None else cell.seconds[first]

    done = [cell for cell in cells if cell.status == OK]
    baseline = {cell.seed: time_s(cell) for cell in done if cell.contestant == _BASELINE}
    found = []
    for name in CONTESTANTS:
        own = sorted((cell for cell in done if cell.contestant == name), key=lambda cell: cell.seed)
        failure = next((cell.status for cell in cells if cell.contestant == name and cell.status != OK), None)
        if not own and failure is None:
            continue
        # Seed by seed, so that a change of the machine's load between seeds falls on both.
        ratios = [time_s(cell) / baseline[cell.seed] for cell in own if 0 < baseline.get(cell.seed, 0.0) < math.inf]
        ratio = statistics.median(ratios) if ratios else math.inf
        steps = [
            math.inf if first is None else min(course.steps, first * course.evaluate_every)
            for first in map(place, own)
        ]  # fmt: skip
        found.append(
            Standing(
                contestant=name,
                times_s=tuple(map(time_s, own)),
                ratio=ratio if math.isfinite(ratio) else None,
                steps=statistics.median(steps) if steps else math.inf,
                cells=tuple(own),
                failure=failure,
            )
        )
    return found


def terminal(course: Course, cells: Sequence[Cell], target: float) -> str:
    """The table with its title and its footnote, in columns."""
    found = standings(course, cells, target)
    columns = in_columns([_headings(course), *(_texts(course, one) for one in found)])
    failures = [f"{one.contestant}: {one.failure}" for one in found if one.failure is not None]
    return "\n".join([_title(course, target), "", columns, *failures, "", _footnote(course, cells)])


def markdown(course: Course, cells: Sequence[Cell], target: float) -> str:
    """The same for a document."""
    found = standings(course, cells, target)
    rows = [[f"`{name}`", *rest] for name, *rest in (_texts(course, one) for one in found)]
    failures = [f"`{one.contestant}`: {one.failure}\n" for one in found if one.failure is not None]
    lines = [f"**{_title(course, target)}**", "", in_markdown([_headings(course), *rows]), "", *failures]
    return "\n".join([*lines, f"{_footnote(course, cells)}."])


def _title(course: Course, target: float) -> str:
    rate = "" if course.learning_rate is None else f", learning rate {course.learning_rate:g}"
    return (
        f"{course.task}, {course.ranks} ranks, {course.link}: time to {_METRICS[course.task][0]} {target:g}, "
        f"{course.model} ({course.parameters / 1e6:.2f} M parameters){rate}"
    )


def _footnote(course: Course, cells: Sequence[Cell]) -> str:
    loads = [cell.load for cell in cells]
    return (
        f"{course.steps} steps of {course.batch_size} samples, evaluated every {course.evaluate_every} with the clock "
        f"stopped; {course.data}; {course.machine}; load before a training {min(loads):g} to {max(loads):g}"
    )


def _headings(course: Course) -> list[str]:
    name = _METRICS[course.task][0]
    return ["contestant", "to target, s", "least - most", "of plain DDP", "steps", "sent, MB", f"final {name}"]


def _texts(course: Course, one: Standing) -> list[str]:
    if not one.times_s:
        return [one.contestant, "failed", *[""] * 5]
    seeds, finite = len(one.times_s), [time_s for time_s in one.times_s if math.isfinite(time_s)]
    time = "never" if math.isinf(one.time_s) else f"{one.time_s:.1f}"
    if len(finite) < seeds:
        time += f" ({len(finite)} of {seeds})"
    # A value that was not finite counts as worse than any.
    worst = -math.inf if _METRICS[course.task][1] else math.inf
    final = statistics.median(worst if cell.metric[-1] is None else cell.metric[-1] for cell in one.cells)
    return [
        one.contestant,
        time,
        f"{min(finite):.1f} - {'never' if len(finite) < seeds else f'{max(finite):.1f}'}" if finite else "-",
        "-" if one.ratio is None else f"{one.ratio:.2f}",
        "-" if math.isinf(one.steps) else f"{one.steps:g}",
        f"{statistics.median(cell.sent_bytes or 0 for cell in one.cells) / 1e6:.1f}",
        f"{final:.3f}" if math.isfinite(final) else "not finite",
    ]
