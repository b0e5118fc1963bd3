"""The report as Markdown: a table of the parts, then each part's own tables and what did not run, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.gpu.report import PartReport, Report, Row

__all__ = ["markdown"]

_WHY_CHARS = 200
# Of cases of which the same is to be said.
_NAMES = 4


def markdown(report: Report, *, level: int = 1) -> str:
    """The whole report, with headings from ``level`` on."""
    return "\n".join(_lines(report, "#" * level)) + "\n"


def _lines(report: Report, heading: str) -> Iterator[str]:
    machine = next((part.data for part in report.parts if part.name == "machine"), {})
    stand_in = "" if report.device == "cuda" else ": a dry run with a CPU in the GPU's place, whose times say nothing"
    yield f"{heading} {machine.get('name', report.device)}{stand_in}"
    yield ""
    if machine.get("sentence"):
        yield machine["sentence"]
        yield ""
    over = "" if report.is_over else "; not over yet"
    yield f"`make gpu`, {report.started}, {report.wall_s:.0f} s of {report.budget_s:.0f} s{over}."
    yield ""
    yield from _table([_summary(part) for part in report.parts])
    for part in report.parts:
        # Of what did not begin the table of the parts says why.
        if part.cases or part.tables or part.status != "not run":
            yield from _part(part, heading + "#")


def _summary(part: PartReport) -> Row:
    well = sum(case.status == "ok" for case in part.cases)
    return {
        "part": part.title,
        "how it went": part.status,
        "cases": f"{well} of {len(part.cases)}" if part.cases else "-",
        "s": round(part.wall_s, 1),
        "": part.why,
    }


def _part(part: PartReport, heading: str) -> Iterator[str]:
    yield ""
    yield f"{heading} {part.title}"
    for text in (part.about, *part.notes):
        if text:
            yield ""
            yield text
    if part.why:
        yield ""
        yield f"**{part.status}**: {part.why}."
    for title, rows in part.tables.items():
        yield ""
        if title:
            yield f"**{title}**"
            yield ""
        yield from _table(rows)
    bad: dict[tuple[str, str], list[str]] = {}
    for case in part.cases:
        if case.status != "ok":
            bad.setdefault((case.status, case.why[:_WHY_CHARS]), []).append(case.name)
    if bad:
        yield ""
        yield from _table([{"case": _names(names), "": status, "why": why} for (status, why), names in bad.items()])
    for name in part.files:
        if name.endswith(".png"):
            yield ""
            yield f"![{part.title}]({name})"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _NAMES else f"{names[0]}, ..., {names[-1]}: {len(names)} cases"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    yield f"| {' | '.join(columns)} |"
    numbers = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in columns]
    yield f"|{'|'.join(' ---: ' if is_number else ' --- ' for is_number in numbers)}|"
    for row in rows:
        yield f"| {' | '.join(_cell(row.get(name)) for name in columns)} |"


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value).replace("|", "\\|").replace("\n", " ")
