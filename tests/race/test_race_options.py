"""Options that a race cannot work with are one line; and in which order contestants train."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlap.cli import main
from overlap.race.settings import Settings


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--task chess", "invalid choice: 'chess' (choose from "),
        ("--ranks 1", "from 2 to 64"),
        ("--contestants ddp,adam", "contestants has adam; known are ddp, torch-fp16"),
        ("--seeds 0", "from 1 to 100"),
        ("--target high", "invalid float value: 'high'"),
        ("--batch-size 65", "batch_size=65 is of all ranks together: give a multiple of ranks=2"),
        ("--batch-size 4 --ranks 4", "leaves one sample a rank: give at least 8"),
        ("--batch-size 2000", "batch_size=2000 is more than the 1437 images"),
        ("--steps 4 --evaluate-every 8", "evaluate_every=8 is more than steps=4"),
        ("--bandwidth fast", "bandwidth='fast' is not a speed"),
        ("--data x", "the digits come with scikit-learn"),
        ("--task cifar", "task='cifar' needs --data"),
        ("--task cifar --data {0}", "holds no CIFAR-10 in Python's format"),
        ("--task text --data {0}/none", "none' does not exist"),
        ("--task text --data {0}/short", "has 3 bytes: give at least 20480"),
        ("--task text --width 18", "is divided among 4 heads: give a multiple of 4"),
        ("--show", "race.json, which does not exist: race first"),
        ("--output {0}/short", "--output is '{0}/short': File exists"),
        ("--into {0}/short", "which has no lines"),
        ("--run-confg x", "(allowed: --help, --task"),
    ],
)
def test_a_bad_option_is_one_line(
    argv: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("abc")
    with pytest.raises(SystemExit) as ended:
        main(["race", *argv.format(tmp_path).split()])
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out, len(shown.err.splitlines())) == (2, "", 1), shown.err
    assert said.format(tmp_path) in shown.err


def test_plain_ddp_always_races_and_every_seed_begins_with_another() -> None:
    settings = Settings.of("text", contestants=("overlap-int4", "torch-fp16"), seeds=2)
    assert settings.entries == (
        ("ddp", 0), ("torch-fp16", 0), ("overlap-int4", 0),
        ("torch-fp16", 1), ("overlap-int4", 1), ("ddp", 1),
    )  # fmt: skip


def test_what_is_not_given_is_the_tasks() -> None:
    given = Settings.of("text", steps=40, width=None)
    assert (given.steps, given.width, given.batch_size) == (40, 128, 64)
