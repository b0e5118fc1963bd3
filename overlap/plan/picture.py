"""A plan as a picture: each candidate's step, predicted and measured, and the link with its fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from overlap.plan.plan import Plan

__all__ = ["formats", "save_plan"]

_INK, _GRID = "#222222", "#dddddd"
_PREDICTED, _MEASURED, _CHOSEN = "#a6cee3", "#4a90c2", "#59a75a"
_MOST_ROWS = 16
_ROW_INCHES = 0.34


def formats() -> set[str]:
    """The endings of files that can be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    return set(FigureCanvasAgg.get_supported_filetypes())


def save_plan(plan: Plan, path: str | Path) -> None:
    """Draw ``plan``: a bar of what was predicted for each candidate, and over it what was measured."""
    # Without a window system: training runs on servers.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = plan.rows[:_MOST_ROWS]
    figure = Figure(figsize=(9.5, 1.9 + _ROW_INCHES * len(rows)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    places = range(len(rows))
    axes.barh(places, [row.predicted_ms for row in rows], color=_PREDICTED, height=0.72, label="predicted", zorder=2)
    measured = [(place, row) for place, row in zip(places, rows, strict=True) if row.measured_ms is not None]
    colors = [_CHOSEN if row.candidate == plan.candidate else _MEASURED for _, row in measured]
    if measured:
        axes.barh([place for place, _ in measured], [row.measured_ms for _, row in measured], color=colors, height=0.36,
                  label="measured", zorder=3)  # fmt: skip
    longest_ms = max(max(row.predicted_ms, row.measured_ms or 0.0) for row in rows)
    for place, row in zip(places, rows, strict=True):
        end_ms = max(row.predicted_ms, row.measured_ms or 0.0)
        words = f"{row.sent_bytes / 1e6:.1f} MB sent{', not to be chosen' if row.note else ''}"
        axes.text(end_ms + 0.01 * longest_ms, place, words, va="center", fontsize=8, color=_INK)
    axes.set_yticks(places, [f"{row.candidate} ({row.kind})" for row in rows], fontsize=9)
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row.candidate == plan.candidate else "normal")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.28 * longest_ms)
    axes.set_xlabel("ms a step")
    axes.grid(axis="x", color=_GRID, lw=0.7, zorder=0)
    figure.legend(loc="outside upper right", ncols=2, fontsize=9, frameon=False)
    axes.set_title(f"{plan.ranks} ranks: {plan.reason}", fontsize=10, loc="left", wrap=True)
    figure.supxlabel("\n".join(line for line in (plan.compute, plan.link) if line), fontsize=8, color=_INK)
    figure.savefig(path)
