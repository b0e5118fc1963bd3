"""Steps as a picture: for each rank a lane of computation, one of communication, one of the code of stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from overlap._checks import require_extra
from overlap.errors import ConfigurationError
from overlap.timeline.report import Interval, Report, StepReport, intersection, without

__all__ = ["check_path", "save_reports"]

_PICTURES = (".png", ".svg", ".pdf")
_INK, _PAPER, _GROUND = "#222222", "#ffffff", "#f4f4f4"
# What a bar means -> its color, in the legend's order.
_COLORS = {
    "forward": "#a6cee3",
    "loss": "#d9e8f2",
    "backward": "#4a90c2",
    "DDP copies gradients": "#b9c4ce",
    "optimizer.step(), update": "#59a75a",
    "DDP broadcasts buffers": "#f2cf3c",
    "reduce": "#f28e3c",
    "transform": "#d98cb3",
    "gather": "#9a6fb8",
    "average": "#2fb3b3",
    "code of the reducer": "#8d5a2b",
}
_WAITS = {"waits for communication (exposed)": "#d62728", "waits for a stage's code alone": "#8c8c8c"}
_PHASES = {"finalization": "DDP copies gradients", "optimizer": "optimizer.step(), update"}
_CODE = {"update": "optimizer.step(), update", "reduce": "code of the reducer"}
_LANE, _LANES, _RANK = 1.18, ("compute", "communication", "updates"), 4.0
_MOST_RANKS = 8
# Narrower bars, as a share of the time axis, are not drawn, or have no room for a number or a word.
_LEAST_SHARE, _NUMBER_SHARE, _WORD_SHARE = 0.0008, 0.012, 0.055

_Bar = tuple[Interval, str, str]
"""When, its meaning and its text."""


def check_path(path: str | Path) -> None:
    """Raises ConfigurationError if no picture can be written under this name, or matplotlib is missing."""
    if Path(path).suffix.lower() not in _PICTURES:
        raise ConfigurationError(f"path is {str(path)!r}: a picture ends in {', '.join(_PICTURES)}")
    require_extra("timeline", "matplotlib")


def save_reports(reports: Mapping[str, Report], path: str | Path, *, step: int | None = None) -> None:
    """Draw one step of each report, each under its title, into one file.

    Args:
        reports: by title, in the order in which they are shown.
        path: ends in ``.png``, ``.svg`` or ``.pdf``.
        step: which step to draw; by default the one that took rank 0 the median time, in each report.

    Raises:
        ConfigurationError: the suffix is none of these, there is no such step, or matplotlib is missing.
    """
    check_path(path)
    # Without a window system: training runs on servers.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {f"{title} (step {of[0].step})": of for title, of in _chosen(reports, step).items()}
    heights = [_RANK * len(steps) for steps in panels.values()]
    figure = Figure(
        figsize=(11.0, 1.3 + sum(0.75 + 0.36 * height for height in heights)), dpi=130, layout="constrained"
    )
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    end_ms = max(
        one.start_ms + max([one.step_ms, *(bucket.done_ms for bucket in one.buckets)])
        for steps in panels.values()
        for one in steps
    )
    shown: set[str] = set()
    for axes, (title, steps) in zip(rows, panels.items(), strict=True):
        axes.set_xlim(0, end_ms * 1.01)
        _draw_panel(axes, steps, end_ms, shown)
        axes.set_title(f"{title}\n{_step_title(steps)}", fontsize=10, loc="left", linespacing=1.4)
    rows[-1].set_xlabel("ms from the start of the step: the forward of the rank that began first", fontsize=10)
    _draw_legend(figure, shown)
    figure.savefig(path)


def _chosen(reports: Mapping[str, Report], number: int | None) -> dict[str, list[StepReport]]:
    """One step of each report, on its first ranks, with ``start_ms`` from the start of the rank that began first."""
    chosen = {}
    for title, report in reports.items():
        wanted = report.median_step() if number is None else number
        steps = [] if wanted is None else list(report.of_step(wanted)[:_MOST_RANKS])
        if not steps:
            recorded = f"0 to {len(report.ranks[0]) - 1}" if report.ranks[0] else "none"
            raise ConfigurationError(f"step is {number}, and the steps that were recorded ({title}) are: {recorded}")
        origin_ms = min(one.start_ms for one in steps)
        chosen[title] = [replace(one, start_ms=one.start_ms - origin_ms) for one in steps]
    return chosen


def _step_title(steps: Sequence[StepReport]) -> str:
    """A step of several ranks in one line."""
    step_ms, exposed_ms, communication_ms = (
        fmean(getattr(step, name) for step in steps) for name in ("step_ms", "exposed_ms", "communication_ms")
    )
    ranks = f"mean of {len(steps)} ranks: " if len(steps) > 1 else ""
    words = f"{ranks}step {step_ms:.1f} ms, communication {communication_ms:.1f} ms, of it exposed {exposed_ms:.1f} ms"
    return f"{words} ({1 - exposed_ms / communication_ms:.0%} overlapped)" if communication_ms else words


def _compute_bars(step: StepReport) -> Iterator[_Bar]:
    for phase in step.phases:
        if phase.name not in ("buffers", "wait"):
            text = "" if phase.name == "finalization" else phase.name
            for part in without([phase], step.waits):
                yield part, _PHASES.get(phase.name, phase.name), text
    exposed, code = _WAITS
    yield from ((part, exposed, "") for part in intersection(step.waits, step.communication))
    yield from ((part, code, "") for part in without(step.waits, step.communication))


def _bucket_bars(step: StepReport, *, collectives: bool) -> Iterator[_Bar]:
    if collectives:
        yield from ((phase, "DDP broadcasts buffers", "") for phase in step.in_phase("buffers"))
    for bucket in step.buckets:
        for one in bucket.activities:
            if one.is_collective is collectives:
                yield one, one.kind if collectives else _CODE.get(one.kind, one.kind), str(bucket.index)


def _draw_panel(axes: Any, steps: Sequence[StepReport], end_ms: float, shown: set[str]) -> None:
    places = []
    for rank, step in enumerate(steps):
        bars = (_compute_bars(step), _bucket_bars(step, collectives=True), _bucket_bars(step, collectives=False))
        shift_ms, top = step.start_ms, _RANK * rank
        for lane, own in enumerate(bars):
            places.append((top + _LANE * lane + 0.5, f"rank {step.rank}  {_LANES[lane]}"))
            _draw_lane(axes, list(own), top + _LANE * lane, shift_ms, end_ms, shown)
        bottom = top + 2 * _LANE + 1.1
        axes.plot([shift_ms + step.step_ms] * 2, [top - 0.1, bottom], color=_INK, lw=1.2, ls=(0, (4, 2)), zorder=5)
        ready = [shift_ms + bucket.ready_ms for bucket in step.buckets]
        axes.plot(ready, [top - 0.1] * len(ready), ls="", marker="v", ms=4.5, color=_INK, zorder=6)
    axes.set_yticks([place for place, _ in places], [label for _, label in places], fontsize=9)
    axes.set_ylim(_RANK * len(steps) - 0.4, -0.35)
    axes.grid(axis="x", color="#dddddd", lw=0.7, zorder=0)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=True, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_lane(axes: Any, bars: list[_Bar], top: float, shift_ms: float, end_ms: float, shown: set[str]) -> None:
    """Bars that overlap in time share the lane's height."""
    axes.axhspan(top, top + 1, color=_GROUND, zorder=0, lw=0)
    bars = [bar for bar in bars if bar[0].duration_ms >= _LEAST_SHARE * end_ms]
    rows = lanes([interval for interval, _, _ in bars])
    height = 1 / (max(rows, default=0) + 1)
    for (interval, meaning, text), row in zip(bars, rows, strict=True):
        shown.add(meaning)
        left_ms, middle, width_ms = shift_ms + interval.start_ms, top + (row + 0.5) * height, interval.duration_ms
        style: dict[str, Any] = {"facecolor": _COLORS.get(meaning, _PAPER), "edgecolor": _PAPER, "lw": 0.5}
        if meaning in _WAITS:
            style |= {"edgecolor": _WAITS[meaning], "hatch": "//////", "lw": 0}
        axes.barh(middle, width_ms, left=left_ms, height=height, zorder=3, **style)
        if width_ms > (_NUMBER_SHARE if text.isdigit() else _WORD_SHARE) * end_ms and height > 0.3:
            center_ms = left_ms + width_ms / 2
            axes.text(center_ms, middle, text, ha="center", va="center", fontsize=8, color=_INK, zorder=4)


def lanes(intervals: Sequence[Interval]) -> list[int]:
    """A lane for each interval, in as few lanes as possible, so that no two in a lane overlap."""
    free_at_ms: list[float] = []
    chosen = [0] * len(intervals)
    for place in sorted(range(len(intervals)), key=lambda place: intervals[place].start_ms):
        start_ms, end_ms = intervals[place].start_ms, intervals[place].end_ms
        lane = next((n for n, free_ms in enumerate(free_at_ms) if free_ms <= start_ms), len(free_at_ms))
        free_at_ms[lane : lane + 1] = [end_ms]
        chosen[place] = lane
    return chosen


def _draw_legend(figure: Any, shown: set[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=color, label=name) for name, color in _COLORS.items() if name in shown]
    handles += [
        Patch(facecolor=_PAPER, edgecolor=color, hatch="//////", lw=0, label=name)
        for name, color in _WAITS.items()
        if name in shown
    ]
    handles += [
        Line2D([], [], ls="", marker="v", ms=5, color=_INK, label="a bucket's gradients are ready"),
        Line2D([], [], ls="", marker="$3$", ms=5, color=_INK, label="index of the bucket"),
        Line2D([], [], ls=(0, (4, 2)), color=_INK, lw=1.2, label="next step"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
