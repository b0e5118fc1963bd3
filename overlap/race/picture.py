"""The picture: the metric over the time of training, a panel for each course, and the target as a line across it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlap.race.contestants import BASELINE, contestants
from overlap.race.results import OK, Cell, Course
from overlap.race.standings import Standing
from overlap.race.table import course_standings
from overlap.race.task import METRICS, Metric

__all__ = ["save_picture"]

_INK, _THEIRS, _GRID = "#111111", "#8c6d31", "#e2e2e2"
_OURS = ("#1f77b4", "#17a2b8", "#2ca02c", "#98c13d", "#d62728", "#9467bd", "#e377c2", "#ff7f0e")
_COLUMNS = 2


def save_picture(courses: Mapping[Course, Sequence[Cell]], targets: Mapping[Course, float], path: str | Path) -> None:
    """Draws every course to a PNG (or what else the suffix says), legible at the width of a README.

    A dot on the target's line is the evaluation at which the median seed is through.
    """
    # Without a window system: races run on servers.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(courses))
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
    metric = METRICS[course.task]
    found = {one.contestant: one for one in course_standings(course, cells, target)}
    # The legend is in the order of arrival.
    for place, (name, one) in enumerate(sorted(found.items(), key=lambda entry: entry[1].time_s)):
        own = [cell for cell in cells if cell.contestant == name and cell.status == OK]
        if not own:
            continue
        seconds, middle, lowest, highest = _over_seeds(own)
        color = _color(name)
        width = 2.6 if name == BASELINE else 1.7
        order = 5 if name == BASELINE else 4 - place / 100
        axes.plot(seconds, middle, color=color, lw=width, zorder=order, label=_label(one))
        axes.fill_between(seconds, lowest, highest, color=color, alpha=0.12, lw=0, zorder=1)
        if math.isfinite(one.time_s):
            axes.plot(one.time_s, target, "o", color=color, ms=6, mec="white", mew=0.8, zorder=6)
    axes.axhline(target, color=_INK, lw=0.9, ls="--", zorder=2)
    axes.set_xlim(left=0)
    _limit_metric(axes, metric, cells, target)
    axes.set_xlabel("seconds of training", fontsize=10)
    axes.set_ylabel(metric.label, fontsize=10)
    link = "loopback, not shaped" if course.bandwidth is None else f"links of {course.bandwidth}"
    axes.set_title(f"{course.task}, {course.ranks} ranks, {link}", fontsize=11, loc="left")
    axes.grid(color=_GRID, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    where = "lower right" if metric.higher_is_better else "upper right"
    axes.legend(fontsize=8, loc=where, framealpha=0.9, title=f"time to {metric.name} {target:g}", title_fontsize=8)


def _over_seeds(cells: Sequence[Cell]) -> tuple[list[float], list[float], list[float], list[float]]:
    """At each evaluation: the median of the seconds; of the metric the median, the least and the most.

    All seeds are evaluated after the same steps. What is not finite leaves a gap.
    """
    seconds = [statistics.median(times) for times in zip(*(cell.seconds for cell in cells), strict=True)]
    values = [
        [math.nan] if None in column else list(column) for column in zip(*(cell.metric for cell in cells), strict=True)
    ]
    return (
        seconds,
        [statistics.median(one) for one in values],
        [min(one) for one in values],
        [max(one) for one in values],
    )


def _limit_metric(axes: Any, metric: Metric, cells: Sequence[Cell], target: float) -> None:
    """Where the race is decided: an untrained model is off the picture where its loss is far from all others."""
    if metric.higher_is_better:
        axes.set_ylim(0, 1)
        return
    trained = [value for cell in cells for value in cell.metric[1:] if value is not None]
    if trained:
        least, most = min(*trained, target), max(*trained, target)
        margin = 0.05 * (most - least) or 0.05
        axes.set_ylim(least - margin, most + margin)


def _label(one: Standing) -> str:
    time = "never" if math.isinf(one.time_s) else f"{one.time_s:.1f} s"
    return f"{one.contestant}: {time}{'' if one.ratio is None else f' ({one.ratio:.2f})'}"


def _color(name: str) -> str:
    if name == BASELINE:
        return _INK
    ours = [other for other in contestants() if other.startswith("overlap-")]
    return _OURS[ours.index(name) % len(_OURS)] if name in ours else _THEIRS
