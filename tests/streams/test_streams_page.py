"""docs/reports/streams.md was written from a run of what is here now."""

from __future__ import annotations

from .mutants import MUTANTS
from .scenarios import SCENARIOS
from .table import PAGE, named


def test_the_page_names_all_scenarios_and_mutants() -> None:
    assert named(PAGE.read_text()) == (set(SCENARIOS), set(MUTANTS)), "run `python tests/streams`"
