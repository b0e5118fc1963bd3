"""docs/reports/loops.md shows what the loops declare."""

from __future__ import annotations

from .table import PAGE, page


def test_the_page_shows_what_the_loops_declare() -> None:
    assert PAGE.read_text() == page(), "run `python tests/loops/table.py`"
