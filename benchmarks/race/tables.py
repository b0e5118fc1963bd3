"""The standings of a race, as a table and as a picture of the curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pages import in_columns, in_markdown
from benchmarks.race.contest import CONTESTANTS
from benchmarks.race.results import OK, Cell, Course

_BASELINE = "ddp"
# By the task's name: the metric, its axis, and whether more is better.
_METRICS = {
    "digits": ("accuracy", "accuracy on the test split", True),
    "text": ("loss", "loss on held-out text (nats a byte)", False),
}
_INK, _THEIRS, _GRID = "#111111", "#8c6d31", "#e2e2e2"
_OURS = ("#1f77b4", "#17a2b8", "#2ca02c", "#98c13d", "#d62728", "#9467bd", "#e377c2", "#ff7f0e")


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
    higher_is_better = _METRICS[course.task][2]

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
    return (
        f"{course.task}, {course.ranks} ranks, {course.link}: time to {_METRICS[course.task][0]} {target:g}, "
        f"{course.model} ({course.parameters / 1e6:.2f} M parameters)"
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
    worst = -math.inf if _METRICS[course.task][2] else math.inf
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


def save_picture(courses: Mapping[Course, Sequence[Cell]], targets: Mapping[Course, float], path: Path) -> None:
    """Draws every course: the metric over the seconds of training, and the target as a line across it.

    A dot on the target's line is the evaluation at which the median seed is through.
    """
    # Without a window system: races run on servers.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(courses))
    rows = math.ceil(len(courses) / columns)
    figure = Figure(figsize=(6.4 * columns + 0.4, 4.6 * rows), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, (course, cells) in zip(panels, courses.items(), strict=False):
        _draw(panel, course, cells, targets[course])
    for panel in panels[len(courses) :]:
        panel.set_visible(False)
    figure.savefig(path)


def _draw(axes: Any, course: Course, cells: Sequence[Cell], target: float) -> None:
    name, label, higher_is_better = _METRICS[course.task]
    # The legend is in the order of arrival.
    for one in sorted(standings(course, cells, target), key=lambda one: one.time_s):
        if not one.cells:
            continue
        # All seeds are evaluated after the same steps. A value that is not finite leaves a gap.
        seconds = [statistics.median(times) for times in zip(*(cell.seconds for cell in one.cells), strict=True)]
        values = [
            [math.nan] if None in column else list(column)
            for column in zip(*(cell.metric for cell in one.cells), strict=True)
        ]
        is_plain = one.contestant == _BASELINE
        text = f"{one.contestant}: " + ("never" if math.isinf(one.time_s) else f"{one.time_s:.1f} s")
        text += "" if one.ratio is None else f" ({one.ratio:.2f})"
        color = _color(one.contestant)
        axes.plot(seconds, list(map(statistics.median, values)), color=color, lw=2.6 if is_plain else 1.7,
                  zorder=5 if is_plain else 4, label=text)  # fmt: skip
        axes.fill_between(seconds, list(map(min, values)), list(map(max, values)), color=color, alpha=0.12, lw=0)
        if math.isfinite(one.time_s):
            axes.plot(one.time_s, target, "o", color=color, ms=6, mec="white", mew=0.8, zorder=6)
    axes.axhline(target, color=_INK, lw=0.9, ls="--", zorder=2)
    axes.set_xlim(left=0)
    # Where the race is decided: the loss of an untrained model is far from all others.
    trained = [value for cell in cells for value in cell.metric[1:] if value is not None] or [target]
    margin = 0.05 * (max(trained) - min(trained)) or 0.05
    axes.set_ylim((0, 1) if higher_is_better else (min(*trained, target) - margin, max(*trained, target) + margin))
    axes.set_xlabel("seconds of training", fontsize=10)
    axes.set_ylabel(label, fontsize=10)
    axes.set_title(f"{course.task}, {course.ranks} ranks, {course.link}", fontsize=11, loc="left")
    axes.grid(color=_GRID, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    where = "lower right" if higher_is_better else "upper right"
    axes.legend(fontsize=8, loc=where, framealpha=0.9, title=f"time to {name} {target:g}", title_fontsize=8)


def _color(name: str) -> str:
    if name == _BASELINE:
        return _INK
    ours = [other for other in CONTESTANTS if other.startswith("overlap-")]
    return _OURS[ours.index(name) % len(_OURS)] if name in ours else _THEIRS
