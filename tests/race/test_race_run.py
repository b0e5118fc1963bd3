"""Races on two ranks: with a clock that is told what to say, and as a user starts them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness import run_ranks
from overlap.bench import settings as bench
from overlap.cli import main
from overlap.race.loading import load_task
from overlap.race.settings import Settings
from overlap.race.training import Curve, train

_SMALL = {"width": 8, "batch_size": 4, "steps": 5, "evaluate_every": 2}


def _train(rank: int, ranks: int, folder: str, name: str) -> Curve:
    settings = Settings.of("text", ranks=ranks, **_SMALL)
    world = bench.Settings(ranks=ranks, model="mlp", device="cpu")
    config = bench.RunConfig(settings=world, variants=(), folder=folder, link="loopback", deadline=time.time())
    # Each reading is a second after the one before on rank 0, and three on rank 1.
    ticks = itertools.count(0, 1 + 2 * rank)
    return train(load_task(settings), settings, config, rank, name, 0, clock=lambda: float(next(ticks)))


@pytest.mark.parametrize("name", ["ddp", "overlap-zero-gather-forward", "overlap-local-sgd"])
def test_the_clock_runs_while_ranks_train_and_is_that_of_the_slowest(name: str, tmp_path: Path) -> None:
    first, second = run_ranks(_train, 2, str(tmp_path), name, backend=None)
    # Three rounds, of two, two and one step; evaluating reads no clock.
    assert first.seconds == second.seconds == [0.0, 3.0, 6.0, 9.0]
    assert len(first.metric) == 4 and all(isinstance(value, float) for value in first.metric)
    assert second.metric == [None] * 4
    assert min(first.sent_bytes, second.sent_bytes) > 0


def _options(folder: Path, *options: str) -> list[str]:
    small = [word for name, value in _SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["race", "--task", "text", *small, "--seeds", "1", "--output", str(folder), *options]


def test_a_race_is_trained_kept_shown_and_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "overlap", *_options(tmp_path, "--contestants", "overlap-step")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "text, 2 ranks, loopback, not shaped: time to loss 2.4" in done.stdout
    assert done.stdout.count("never (0 of 1)") == 2
    cells = _cells(tmp_path)
    # The update in backward is plain DDP's in every bit, so the curves are the same, and as much is sent.
    assert cells["overlap-step"]["metric"] == cells["ddp"]["metric"]
    assert cells["overlap-step"]["sent_bytes"] == pytest.approx(cells["ddp"]["sent_bytes"], rel=0.02)
    assert cells["ddp"]["metric"][-1] < cells["ddp"]["metric"][0] - 0.1
    assert (tmp_path / "race.png").exists()

    # Nothing is left to train.
    assert main(_options(tmp_path, "--contestants", "overlap-step", "--target", "5.8")) == 0
    again = capsys.readouterr()
    assert "2 of 2 trainings are in" in again.err
    assert _cells(tmp_path) == cells
    assert "never" not in again.out and "5.8" in again.out


def _cells(folder: Path) -> dict[str, dict[str, Any]]:
    (found,) = json.loads((folder / "race.json").read_text())["courses"]
    return {one["contestant"]: one for one in found["cells"]}
