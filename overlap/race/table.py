"""The table of a course: lines for a terminal, Markdown for a document."""

from __future__ import annotations

import math
from collections.abc import Sequence

from overlap.race.contestants import contestants
from overlap.race.results import Cell, Course
from overlap.race.standings import Standing, standings
from overlap.race.task import METRICS

__all__ = ["course_standings", "footnote", "markdown", "terminal", "title"]


def course_standings(course: Course, cells: Sequence[Cell], target: float) -> list[Standing]:
    """The lines of the table, plain DDP first."""
    return standings(
        cells,
        tuple(contestants()),
        METRICS[course.task],
        target,
        evaluate_every=course.evaluate_every,
        steps=course.steps,
    )


def title(course: Course, target: float) -> str:
    """What was run, on one line."""
    return (
        f"{course.task}, {course.ranks} ranks, {_link(course)}: time to "
        f"{METRICS[course.task].name} {target:g}, {course.model} ({course.parameters / 1e6:.2f} M parameters)"
    )


def footnote(course: Course, cells: Sequence[Cell]) -> str:
    """What the figures were taken on."""
    loads = [cell.load for cell in cells]
    return (
        f"{course.steps} steps of {course.batch_size} samples, evaluated every {course.evaluate_every} with the clock "
        f"stopped; {course.data}; {course.machine}; load before a training {min(loads):g} to {max(loads):g}"
    )


def terminal(course: Course, cells: Sequence[Cell], target: float) -> str:
    """The table with its title and its footnote, in columns."""
    rows = [_headings(course), *(_texts(one) for one in course_standings(course, cells, target))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    failures = [
        f"{one.contestant}: {one.failure}" for one in course_standings(course, cells, target) if one.failure is not None
    ]
    return "\n".join([title(course, target), "", *lines, *failures, "", footnote(course, cells)])


def markdown(course: Course, cells: Sequence[Cell], target: float) -> str:
    """The same for a document."""
    headings = _headings(course)
    lines = [
        f"**{title(course, target)}**",
        "",
        f"| {' | '.join(headings)} |",
        f"| --- |{' ---: |' * (len(headings) - 1)}",
    ]
    found = course_standings(course, cells, target)
    lines += [f"| {' | '.join([f'`{name}`', *rest])} |" for name, *rest in map(_texts, found)]
    lines += ["", *(f"`{one.contestant}`: {one.failure}\n" for one in found if one.failure is not None)]
    return "\n".join([*lines, f"{footnote(course, cells)}."])


def _headings(course: Course) -> list[str]:
    name = METRICS[course.task].name
    return ["contestant", "to target, s", "least - most", "of plain DDP", "steps", "sent, MB", f"final {name}"]


def _texts(one: Standing) -> list[str]:
    if not one.times_s:
        return [one.contestant, "failed", *[""] * 5]
    seeds = len(one.times_s)
    time = "never" if math.isinf(one.time_s) else f"{one.time_s:.1f}"
    if one.reached < seeds:
        time += f" ({one.reached} of {seeds})"
    finite = [time_s for time_s in one.times_s if math.isfinite(time_s)]
    return [
        one.contestant,
        time,
        f"{min(finite):.1f} - {'never' if one.reached < seeds else f'{max(finite):.1f}'}" if finite else "-",
        "-" if one.ratio is None else f"{one.ratio:.2f}",
        "-" if math.isinf(one.steps) else f"{one.steps:g}",
        "-" if one.sent_bytes is None else f"{one.sent_bytes / 1e6:.1f}",
        "not finite" if one.final is None else f"{one.final:.3f}",
    ]


def _link(course: Course) -> str:
    return "loopback, not shaped" if course.bandwidth is None else f"links of {course.bandwidth}"
