"""Tables, for a terminal and in Markdown, and their place in a page of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def in_columns(rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """Rows of text, the first of them headings, in columns; those not in `left` are aligned to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if place in left else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def in_markdown(rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> str:
    """The same as a table of Markdown."""
    rule = ["---" if place in left else "---:" for place in range(len(rows[0]))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *map(_escaped, rows[1:])))


def _escaped(row: Sequence[str]) -> list[str]:
    return [text.replace("|", "\\|").replace("\n", " ") for text in row]


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replaces the text between two comments of a page.

    Raises:
        ValueError: the page has no such comments.
    """
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no place for a table: add a line {begin!r} and a line {end!r}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
