"""The table that a run prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from overlap.bench.results import OK, Report, Row

_HEADINGS = (
    "variant", "ms a step", "p25 - p75", "ratio", "to fp16", "sent MB", "peak MB", "exposed ms", "floor ms", "score",
    "baseline",
)  # fmt: skip
_OURS = "overlap-"
_UNBOUNDED = 1000


def print_report(report: Report, console: Console | None = None) -> None:
    """Prints the table, the failures in full below it, and what the numbers were taken on."""
    console = console or Console()
    table = Table(title=title(report), box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading in ("variant", "baseline") else "right", no_wrap=True)
    for row in report.rows:
        table.add_row(*_cells(row), style="bold" if row.variant.startswith(_OURS) else None)
    # Numbers that are cut off are worse than lines that a narrow terminal wraps.
    unbounded = console.options.update(max_width=_UNBOUNDED)
    console.width = max(console.width, console.measure(table, options=unbounded).maximum)
    console.print(table)
    for row in report.rows:
        if row.status != OK:
            console.print(f"{row.variant}: {row.status}", markup=False, highlight=False)
    console.print(_footnote(report), markup=False, highlight=False)


def markdown(report: Report) -> str:
    """The table for a document, with failures in the column of times and the footnote below."""
    rows = [
        _cells(row) if row.median_ms is not None else [row.variant, row.status, *[""] * 8, row.baseline]
        for row in report.rows
    ]
    # A column that says nothing is left out.
    kept = [place for place in range(len(_HEADINGS)) if any(cells[place] not in ("", "-") for cells in rows)]
    rules = ["---" if place in (0, len(_HEADINGS) - 1) else "---:" for place in kept]
    lines = [f"**{title(report)}**", "", _line([_HEADINGS[place] for place in kept]), _line(rules)]
    for row, cells in zip(report.rows, rows, strict=True):
        name = f"**{cells[0]}**" if row.variant.startswith(_OURS) else cells[0]
        lines.append(_line([name, *(cells[place].replace("|", "\\|") for place in kept[1:])]))
    return "\n".join([*lines, "", _footnote(report).replace("\n", " "), ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def title(report: Report) -> str:
    """What was run, on one line; says "simulated" where the link is."""
    settings = report.settings
    ranks, batch_size = settings["ranks"], settings["batch_size"]
    parts = [settings["model"], f"batch {batch_size}", f"{ranks} ranks", _link_in_words(settings)]
    if settings.get("gradient_as_bucket_view"):
        parts.append("gradients as views of the buckets")
    return ", ".join(parts)


def _link_in_words(settings: dict[str, Any]) -> str:
    measured = f"{8 * settings['measured_bytes_per_s'] / 1e9:.2g} Gbit/s measured"
    if settings["link"] == "simulated":
        return f"SIMULATED link of {settings['bandwidth']}, one process"
    if settings["link"] == "namespaces":
        return f"links of {settings['bandwidth']} ({measured})"
    return f"{'loopback' if settings['link'] == 'loopback' else 'NCCL'}, not shaped ({measured})"


def _footnote(report: Report) -> str:
    machine = report.machine
    on = ", ".join(machine.get("gpus", ())) or f"{machine['cpu']}, {machine['cores']} cores"
    return (
        f"Times are of each step's slowest rank, variants taking turns. Sent: per rank and step. Exposed: over "
        f"compute-only. Score: floor / step.\n{on}; torch {machine['torch']}; load {machine['load']}."
    )


def _cells(row: Row) -> list[str]:
    if row.median_ms is None:
        return [row.variant, row.status.partition(":")[0], *[""] * 8, row.baseline]
    return [
        row.variant,
        f"{row.median_ms:.1f}",
        f"{row.p25_ms:.1f} - {row.p75_ms:.1f}",
        _number(row.ratio, "{:.3f}"),
        _number(row.ratio_to_16bit, "{:.3f}"),
        _number(row.bytes_sent_per_step, "{:.2f}", 1e6),
        _number(row.peak_memory_bytes, "{:.0f}", 1e6),
        _number(row.exposed_ms, "{:.1f}"),
        _number(row.floor_ms, "{:.1f}"),
        _number(row.score, "{:.0%}"),
        row.baseline,
    ]


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "-" if value is None else form.format(value / unit)
