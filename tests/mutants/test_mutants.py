"""The list fits the package and the tests of today, and a mutant that is run is found."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from mutants.__main__ import ROOT, copied_to, tried
from mutants.list import MUTANTS


def test_there_are_sixty() -> None:
    assert len(MUTANTS) >= 60


@pytest.mark.parametrize("name", MUTANTS)
def test_it_can_be_made_and_its_tests_are_there(name: str) -> None:
    mutant = MUTANTS[name]
    text = (ROOT / "overlap" / mutant.file).read_text()
    assert text.count(mutant.before) == 1, f"{mutant.before!r} is {text.count(mutant.before)} times in {mutant.file}"
    ast.parse(text.replace(mutant.before, mutant.after))
    (path, _, test), *options = (shlex.split(mutant.tests)[0].partition("::"), *shlex.split(mutant.tests)[1:])
    file = ROOT / "tests" / path
    assert f"def {test}" in file.read_text()
    folder = "".join(each.read_text() for each in file.parent.glob("*.py"))
    for word in re.findall(r"\w+", " ".join(options[1:])):  # Of a -k: in the name of a test or of a parameter.
        assert word in ("and", "or", "not") or word in folder, f"{mutant.tests} selects no test"


def test_a_mutant_is_found(tmp_path: Path) -> None:
    name = "small matrices are compressed"
    result = tried(name, MUTANTS[name], copied_to(tmp_path))
    assert result.outcome == "found" and result.by.startswith("hooks/powersgd/test_layout.py::"), result
