"""The page on the update lifecycle shows the table that the code follows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_documented_table_is_that_of_the_code(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("draw_lifecycle", DOCS / "draw_lifecycle.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.table() in (DOCS / "lifecycle.md").read_text()
    script.draw(tmp_path / "lifecycle.png")
    assert (tmp_path / "lifecycle.png").stat().st_size > 0
