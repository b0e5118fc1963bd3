"""The picture: a bar per variant with its quartiles, the floor as a line across it, and failures named."""

from __future__ import annotations

from pathlib import Path

from overlap.bench.report import title
from overlap.bench.results import Report, Row
from overlap.bench.variant import COMPUTE_ONLY

_OURS, _THEIRS, _COMPUTE = "#2a7f9e", "#c9a66b", "#9a9a9a"
_INK = "#222222"


def save_plot(report: Report, path: str | Path) -> None:
    """Draws `report` to a PNG that is legible at the width of a README."""
    # Without a window system: a bench runs on servers.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = list(report.rows)
    figure = Figure(figsize=(9.0, 1.9 + 0.36 * len(rows)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    longest = max((row.p75_ms or 0.0 for row in rows), default=0.0) or 1.0
    for place, row in enumerate(rows):
        if row.median_ms is None or row.p25_ms is None or row.p75_ms is None:
            axes.text(
                longest * 0.01,
                place,
                _in_short(row),
                va="center",
                fontsize=9,
                style="italic",
                color="#a03030",
            )
            continue
        whiskers = [[row.median_ms - row.p25_ms], [row.p75_ms - row.median_ms]]
        axes.barh(place, row.median_ms, height=0.66, color=_color(row), zorder=2)
        axes.errorbar(row.median_ms, place, xerr=whiskers, color=_INK, capsize=3, lw=1.2, zorder=4)
        ratio = "" if row.ratio is None or row.variant == row.baseline else f"  ({row.ratio:.2f}x)"
        axes.text(row.p75_ms + longest * 0.015, place, f"{row.median_ms:.0f}{ratio}", va="center", fontsize=9)
        if row.floor_ms is not None:
            axes.plot([row.floor_ms] * 2, [place - 0.42, place + 0.42], color="#d62728", lw=2.2, zorder=3)
    axes.set_yticks(range(len(rows)), [row.variant for row in rows], fontsize=10)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.2)
    axes.set_xlabel("step time in ms, median with quartiles   (ratio to the row's baseline)", fontsize=10)
    axes.grid(axis="x", color="#dddddd", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title(report), fontsize=11, loc="left")
    handles = [
        Patch(color=_OURS, label="overlap"),
        Patch(color=_THEIRS, label="PyTorch"),
        Patch(color=_COMPUTE, label="compute only"),
        Line2D([], [], color="#d62728", lw=2.2, label="floor"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    figure.savefig(path)


def _color(row: Row) -> str:
    if row.variant == COMPUTE_ONLY:
        return _COMPUTE
    return _OURS if row.variant.startswith("overlap-") else _THEIRS


def _in_short(row: Row) -> str:
    return row.status if len(row.status) <= 72 else f"{row.status[:71]}…"
