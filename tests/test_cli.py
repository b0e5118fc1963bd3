"""The command line: quick help, and an error for what it cannot work with."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

import overlap
from overlap import _checks
from overlap.cli import COMMANDS, main


@pytest.mark.parametrize(
    ("argv", "allowed"),
    [
        ("dmeo", "'demo'"),
        ("demo --optimizer lion", "sgd, adamw"),
        ("demo --optimizer", "expected one argument"),
        ("demo --ranks 0", "from 1 to 64"),
        ("demo --epochs many", "from 1 to 1000"),
        ("demo --rank 2", "--ranks"),
        ("demo --images 3 --ranks 4", "give --images 128 or more"),
    ],
)
def test_a_bad_option_is_refused_with_what_is_allowed(
    argv: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv.split())
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert allowed.replace("'", "") in shown.err.replace("'", "")


def test_a_folder_that_cannot_be_made_is_refused_before_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--output", f"{tmp_path}/file"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: cannot make the folder {tmp_path}/file: File exists\n")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def find_spec(name: str) -> object:
        return None if name in ("torchvision", "sklearn") else importlib.util.find_spec(name)

    monkeypatch.setattr(_checks, "find_spec", find_spec)
    with pytest.raises(SystemExit):
        main(["demo"])
    assert "torchvision, sklearn not installed: pip install '.[demo]' in a clone" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--help"], *([name, "--help"] for name in COMMANDS)])
def test_help_is_printed_with_only_those_defaults_that_say_something(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: overlap")
    assert not any(f"(default: {nothing})" in shown for nothing in ("()", "None", "False", "==SUPPRESS=="))


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"overlap {overlap.__version__}\n"


def test_every_hint_at_an_extra_names_one_that_there_is() -> None:
    root = Path(__file__).parent.parent
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    hints = [
        hint
        for folder in ("overlap", "docs", "README.md")
        for path in [root / folder, *(root / folder).rglob("*.*")]
        if path.suffix in (".py", ".md")
        for hint in re.findall(r"pip install '?([\w.-]+)\[([^\]{}]+)\]", path.read_text())
    ]
    assert hints
    for name, chosen in hints:
        assert name == "." and set(chosen.split(",")) <= set(extras), (name, chosen)


def test_ranks_that_contradict_the_launcher_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--ranks", "2"])
    assert ended.value.code == 2
    assert "--ranks is 2, but the launcher started 3" in capsys.readouterr().err
