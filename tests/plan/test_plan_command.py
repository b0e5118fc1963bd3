"""`overlap plan` from a saved profile: the table, what it saves, and options that it cannot work with."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap import Plan
from overlap.cli import main
from overlap.plan.profile import ParameterTimes, Profile


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Of a step of 30 ms with 1.3 MB of gradients."""
    path = tmp_path / "profile.json"
    Profile(
        forward_ms=10,
        backward_ms=20,
        update_ms=1,
        copy_ms=0.1,
        parameters=tuple(
            ParameterTimes(name=f"{place}.weight", shape=(256, 256), needed_ms=8 - 2 * place, ready_ms=4 * (place + 1))
            for place in range(5)
        ),
        where="a test",
    ).save(path)
    return path


def _run(*argv: str) -> int:
    return main(["plan", *argv])


def test_a_slow_link_on_paper_takes_what_sends_least(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "plan.json"
    options = ["--profile", str(profile), "--ranks", "64", "--bandwidth", "10mbit", "--latency", "30us"]
    # Compressors are measured, perhaps beside other work; this link is slower.
    assert _run(*options, "--json", str(saved)) == 0
    shown = capsys.readouterr().out
    plan = Plan.load(saved)
    assert plan.method == "powersgd-4"
    assert plan.ranks == 64
    # 2 N 63/64 bytes at 1.25 MB/s.
    (plain,) = (row for row in plan.rows if row.method == "ddp" and row.bucket_cap_mb is None)
    assert plain.predicted_ms > 2 * 5 * 256 * 256 * 4 * 63 / 64 / 1.25e3
    assert plan.reason in shown
    assert plan.reason.startswith(f"{plan.candidate} was chosen")
    assert "0.01 Gbit/s, 30 us a message, ring, on paper" in shown
    assert "Predicted, not measured" in shown


def test_exact_alone_is_what_the_table_has(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("--profile", str(profile), "--allow", "exact", "--bandwidth", "400gbit", "--algorithm", "tree") == 0
    shown = capsys.readouterr().out
    assert "powersgd" not in shown
    assert "ddp" in shown


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--latency soon", "latency='soon' is not a time"),
        ("--bandwidth fast", "bandwidth='fast' is not a speed"),
        ("--allow exact,4-bit", "allow has '4-bit'"),
        ("--memory tiny", "memory='tiny' is not 'small'"),
        ("--memory 10", "memory=10 leaves nothing to choose"),
        ("--profile missing.json", "profile='missing.json' is not a profile"),
        ("--ranks 1", "not a whole number from 2"),
        ("--json nowhere/plan.json", "json='nowhere/plan.json' lies in a folder that does not exist"),
    ],
)
def test_a_bad_option_is_one_line(profile: Path, options: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [] if "--profile" in options else ["--profile", str(profile), "--allow", "exact"]
    with pytest.raises(SystemExit) as ended:
        _run(*given, *options.split())
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert len(shown.err.splitlines()) == 1
