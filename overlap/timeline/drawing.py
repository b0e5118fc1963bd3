"""Reports as a picture: for each rank a lane of what was computed, one of what was sent, one of what stages ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overlap.timeline.layout import LANE, Bar, Panel, panel_of
from overlap.timeline.report import Report
from overlap.timeline.table import step_title

__all__ = ["save_picture"]

_INK, _PAPER, _LANE_GROUND, _GRID = "#222222", "#ffffff", "#f4f4f4", "#dddddd"
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
# What the training thread waits for -> its hatching.
_WAITS = {
    "exposed": ("#d62728", "waits for communication (exposed)"),
    "waiting": ("#8c8c8c", "waits for a stage's code alone"),
}
# Narrower bars, as a share of the time axis, have no room for a word or a number.
_WORD_SHARE, _NUMBER_SHARE = 0.055, 0.012
_LEAST_TEXT_HEIGHT = 0.3


def save_picture(reports: Mapping[str, Report], path: str | Path, *, step: int | None = None) -> None:
    """Draw one step of each report, one panel above the other on one time axis.

    Raises:
        ConfigurationError: a report has no such step.
    """
    # Without a window system: training runs on servers.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [panel_of(title, report, step) for title, report in reports.items()]
    heights = [panel.height for panel in panels]
    height_inches = 1.3 + sum(0.75 + 0.36 * height for height in heights)
    figure = Figure(figsize=(11.0, height_inches), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    end_ms = max(panel.end_ms for panel in panels)
    for axes, panel in zip(rows, panels, strict=True):
        axes.set_xlim(0, end_ms * 1.01)
        _draw_panel(axes, panel, end_ms)
    rows[-1].set_xlabel("ms from the start of the step: the forward of the rank that began first", fontsize=10)
    _draw_legend(figure, panels)
    figure.savefig(path)


def _draw_panel(axes: Any, panel: Panel, end_ms: float) -> None:
    for lane in panel.lanes:
        axes.axhspan(lane.top, lane.top + LANE, color=_LANE_GROUND, zorder=0, lw=0)
        for bar in lane.bars:
            _draw_bar(axes, bar, end_ms)
    for place, step in enumerate(panel.steps):
        top, bottom = panel.lanes[3 * place].top - 0.1, panel.lanes[3 * place + 2].top + LANE + 0.1
        shift_ms = panel.shift_ms(step)
        axes.plot([shift_ms + step.step_ms] * 2, [top, bottom], color=_INK, lw=1.2, ls=(0, (4, 2)), zorder=5)
        ready = [shift_ms + bucket.ready_ms for bucket in step.buckets]
        axes.plot(ready, [top] * len(ready), ls="", marker="v", ms=4.5, color=_INK, zorder=6)
    axes.set_yticks([lane.top + LANE / 2 for lane in panel.lanes], [lane.label for lane in panel.lanes], fontsize=9)
    axes.set_ylim(panel.height + 0.15, -0.35)
    axes.grid(axis="x", color=_GRID, lw=0.7, zorder=0)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelbottom=True, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(
        f"{panel.title} (step {panel.steps[0].step})\n{step_title(panel.steps)}",
        fontsize=10,
        loc="left",
        linespacing=1.4,
    )


def _draw_bar(axes: Any, bar: Bar, end_ms: float) -> None:
    if bar.meaning in _WAITS:
        style: dict[str, Any] = {"facecolor": _PAPER, "edgecolor": _WAITS[bar.meaning][0], "hatch": "//////", "lw": 0}
    else:
        style = {"facecolor": _COLORS[bar.meaning], "edgecolor": _PAPER, "lw": 0.5}
    width_ms, middle = bar.interval.duration_ms, bar.top + bar.height / 2
    if width_ms < _NUMBER_SHARE / 2 * end_ms:
        style["lw"] = 0  # A border would leave nothing of it.
    axes.barh(middle, width_ms, left=bar.interval.start_ms, height=bar.height, zorder=3, **style)
    least_share = _NUMBER_SHARE if bar.text.isdigit() else _WORD_SHARE
    if width_ms > least_share * end_ms and bar.height > _LEAST_TEXT_HEIGHT:
        center_ms = bar.interval.start_ms + width_ms / 2
        axes.text(center_ms, middle, bar.text, ha="center", va="center", fontsize=8, color=_INK, zorder=4)


def _draw_legend(figure: Any, panels: Sequence[Panel]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = {bar.meaning for panel in panels for lane in panel.lanes for bar in lane.bars}
    handles: list[Any] = [Patch(color=color, label=name) for name, color in _COLORS.items() if name in shown]
    handles += [
        Patch(facecolor=_PAPER, edgecolor=color, hatch="//////", lw=0, label=label)
        for name, (color, label) in _WAITS.items()
        if name in shown
    ]
    handles += [
        Line2D([], [], ls="", marker="v", ms=5, color=_INK, label="a bucket's gradients are ready"),
        Line2D([], [], ls="", marker="$3$", ms=5, color=_INK, label="index of the bucket"),
        Line2D([], [], ls=(0, (4, 2)), color=_INK, lw=1.2, label="next step"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
