"""What a new user copies works as it stands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from overlap.launch import run_ranks

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs_on_two_ranks(example: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_ranks([], 2, prefix=lambda rank: [sys.executable, str(example)], timeout_s=120) == 0
    assert "rank 0: loss" in capfd.readouterr().out


def test_the_readme_shows_the_example_as_it_is() -> None:
    program = (ROOT / "examples" / "train.py").read_text().split("\n\n", 1)[1]
    assert f"```python\n{program}```" in (ROOT / "README.md").read_text()
