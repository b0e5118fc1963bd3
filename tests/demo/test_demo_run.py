"""The whole command, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# As little as it takes to have a second step, with the buckets that DDP rebuilds after the first.
TINY = ["--images", "48", "--epochs", "1", "--batch-size", "8", "--image-size", "16"]


class Demo:
    """One run of two ranks, what it printed and what it saved."""

    def __init__(self, folder: Path) -> None:
        saved = folder / "sub" / "out.json"
        command = [sys.executable, "-m", "overlap", "demo", *TINY, "--seed", "3", "--device", "cpu"]
        self.done = subprocess.run(
            [*command, "--output", folder, "--json", saved], check=False, capture_output=True, text=True, timeout=120
        )
        assert saved.exists(), self.done.stdout + self.done.stderr
        self.results: dict[str, Any] = json.loads(saved.read_text())
        self.plot = folder / "loss.png"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    return Demo(tmp_path_factory.mktemp("demo"))


def test_two_ranks_end_up_equal(demo: Demo) -> None:
    assert demo.results["parity_max_abs_diff"] == 0
    assert demo.results["must_be_equal"] and demo.results["passed"]
    assert demo.done.returncode == 0, demo.done.stdout + demo.done.stderr


def test_the_verdict_is_printed(demo: Demo) -> None:
    assert "Equal: parameters, optimizer state and buffers are the same in every bit." in demo.done.stdout


def test_progress_is_shown(demo: Demo) -> None:
    assert "step/s" in demo.done.stderr


def test_losses_and_accuracies_of_both_runs_are_the_same(demo: Demo) -> None:
    assert len(demo.results["loss_plain"]) == 3
    assert demo.results["loss_plain"] == demo.results["loss_overlapped"]
    assert demo.results["accuracy_plain"] == demo.results["accuracy_overlapped"]


def test_the_json_tells_what_ran_and_how_long_a_step_took(demo: Demo) -> None:
    assert demo.results["plan_overlapped"] == "chain(AllReduce(), Step(SGD, interleaved))"
    assert demo.results["step_ms_plain"] > 0 and demo.results["step_ms_overlapped"] > 0
    assert demo.results["settings"]["seed"] == 3
    assert demo.results["machine"]["ranks"] == 2


def test_the_loss_curves_are_saved(demo: Demo) -> None:
    assert demo.plot.read_bytes().startswith(b"\x89PNG")
