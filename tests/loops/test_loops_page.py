"""docs/loops.md shows what the loops declare."""

from __future__ import annotations

from .corpus import load
from .table import PAGE, page


def test_the_page_shows_what_the_loops_declare() -> None:
    assert PAGE.read_text() == page(), "run `python tests/loops/table.py`"


def test_no_loop_is_known_to_be_wrong() -> None:
    assert not [loop.name for loop in load().values() if "wrong" in {e.kind for e in loop.expected.values()}]
