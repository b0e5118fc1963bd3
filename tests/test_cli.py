"""The command line: quick help, and an error for what it cannot work with."""

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
        ("estimate --machines 0", "--machines must be more than 0"),
        ("estimate --cpu", "--cpu needs --compute-ms"),
    ],
)
def test_a_bad_option_is_refused_with_what_is_allowed(
    argv: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert allowed.replace("'", "") in _refused(argv.split(), capsys).replace("'", "")


def _refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err


def test_what_cannot_be_done_is_refused_before_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    said = _refused(["demo", "--output", f"{tmp_path}/file"], capsys)
    assert said.endswith(f"error: cannot make the folder {tmp_path}/file: File exists\n")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "--ranks is 2, but the launcher started 3" in _refused(["demo", "--ranks", "2"], capsys)
    find_spec = importlib.util.find_spec
    missing = ("torchvision", "sklearn")
    monkeypatch.setattr(_checks, "find_spec", lambda name: None if name in missing else find_spec(name))
    assert "torchvision, sklearn not installed: pip install '.[demo]' in a clone" in _refused(["demo"], capsys)


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
