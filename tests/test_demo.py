"""The demo, small: what it prints, saves and returns, and that it notices two runs that differ."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from overlap._torchvision import load_torchvision
from overlap.demo.data import load_digits, shard
from overlap.demo.experiment import present
from overlap.demo.parity import Parity, largest_difference
from overlap.demo.report import Outcome, Report
from overlap.demo.settings import TRAIN_IMAGES, Settings
from overlap.launch import World

# As little as it takes to have a second step, with the buckets that DDP rebuilds after the first.
TINY = ["--images", "48", "--epochs", "1", "--batch-size", "8", "--image-size", "16"]
CPU = torch.device("cpu")


def test_two_ranks_end_up_equal(tmp_path: Path) -> None:
    shown, results = _demo([*TINY, "--seed", "3"], tmp_path)
    assert results["parity_max_abs_diff"] == 0
    assert results["must_be_equal"] and results["passed"]
    assert "Equal: parameters, optimizer state and buffers are the same in every bit." in shown
    assert results["plan_overlapped"] == "chain(AllReduce(), Step(SGD, interleaved))"
    assert len(results["loss_plain"]) == 3
    assert results["loss_plain"] == results["loss_overlapped"]
    assert results["accuracy_plain"] == results["accuracy_overlapped"]
    assert results["step_ms_plain"] > 0 and results["step_ms_overlapped"] > 0
    assert results["settings"]["seed"] == 3
    assert results["machine"]["ranks"] == 2


def test_bf16_gradients_are_compared_by_accuracy(tmp_path: Path) -> None:
    shown, results = _demo([*TINY, "--bf16-gradients", "--optimizer", "adamw"], tmp_path)
    assert not results["must_be_equal"]
    assert 0 < results["parity_parameters_max_abs_diff"] < 1
    assert "these gradients are rounded" in shown
    assert results["plan_overlapped"] == "chain(Cast(bfloat16, AllReduce()), Step(AdamW, interleaved))"


def test_uneven_batches_end_up_equal(tmp_path: Path) -> None:
    shown, results = _demo([*TINY, "--uneven", "--epochs", "2"], tmp_path)
    assert "uneven: ranks run 3, 2 steps an epoch, under Join" in shown
    assert results["parity_max_abs_diff"] == 0
    assert results["must_be_equal"] and results["passed"]
    assert len(results["loss_plain"]) == 6
    assert results["loss_plain"] == results["loss_overlapped"]


@pytest.mark.parametrize("difference", [1e-9, math.inf])
def test_runs_that_differ_fail(difference: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = _report(Parity(parameters=0.0, optimizer_state=difference, buffers=0.0), tmp_path)
    assert present(report) == 1
    assert "NOT EQUAL" in capsys.readouterr().out
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["parity_max_abs_diff"] == (difference if math.isfinite(difference) else None)
    assert not saved["passed"]


def test_rounded_runs_fail_when_the_overlapped_is_less_accurate(tmp_path: Path) -> None:
    rounded = dataclasses.replace(_report(Parity(0.1, 0.1, 0.1), tmp_path), exact=False)
    assert rounded.passed
    worse = dataclasses.replace(rounded, overlapped=dataclasses.replace(rounded.overlapped, accuracy=0.9))
    assert not worse.passed
    assert worse.verdict().startswith("LESS ACCURATE")


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"weight": torch.tensor([1.0, 2.0]), "step": 3, "empty": None}, 0.0),
        ({"weight": torch.tensor([1.0, 2.5]), "step": 3, "empty": None}, 0.5),
        ({"weight": torch.tensor([1.0, 2.0]), "step": 4, "empty": None}, 1.0),
        ({"weight": torch.tensor([1.0, math.nan]), "step": 3, "empty": None}, math.inf),
        ({"weight": torch.tensor([1.0]), "step": 3, "empty": None}, math.inf),
        ({"weight": torch.tensor([1.0, 2.0]), "step": 3, "empty": 0.0}, math.inf),
        ({"weight": torch.tensor([1.0, 2.0])}, math.inf),
    ],
)
def test_the_largest_difference(other: dict[str, object], difference: float) -> None:
    one = {"weight": torch.tensor([1.0, 2.0]), "step": 3, "empty": None}
    assert largest_difference(one, other) == difference


def test_ranks_share_out_every_image_once() -> None:
    digits = load_digits(image_size=8, images=TRAIN_IMAGES, device=CPU)
    assert digits.train_images.shape == (TRAIN_IMAGES, 3, 8, 8)
    assert len(digits.train_labels) + len(digits.test_labels) == 1797
    assert digits.train_images.min() == -1 and digits.train_images.max() == 1
    numbered = dataclasses.replace(digits, train_labels=torch.arange(TRAIN_IMAGES))

    def labels(rank: int, *, epoch: int = 0) -> list[int]:
        batches = shard(numbered, epoch=epoch, seed=0, rank=rank, ranks=2, batch_size=32)
        return torch.cat([own for _, own in batches]).tolist()

    seen = labels(0) + labels(1)
    assert len(labels(0)) == len(labels(1)) == 22 * 32
    assert len(set(seen)) == len(seen)
    assert labels(0) == labels(0)
    assert labels(0) != labels(0, epoch=1)


def test_torchvision_is_there_whatever_it_was_built_for() -> None:
    torchvision = load_torchvision()
    assert torchvision is load_torchvision()
    assert torchvision.models.resnet18(num_classes=10).fc.out_features == 10


def _demo(options: list[str], folder: Path) -> tuple[str, dict[str, object]]:
    saved = folder / "sub" / "out.json"
    command = [sys.executable, "-m", "overlap", "demo", *options, "--device", "cpu"]
    done = subprocess.run(
        [*command, "--output", folder, "--json", saved], check=False, capture_output=True, text=True, timeout=120
    )
    assert saved.exists(), done.stdout + done.stderr
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "step/s" in done.stderr
    results = json.loads(saved.read_text())
    # So few steps leave the accuracy to chance, and with it what comes of runs that are compared by it.
    assert done.returncode == (0 if results["passed"] else 1), done.stdout + done.stderr
    return done.stdout, results


def _report(parity: Parity, folder: Path) -> Report:
    outcome = Outcome(plan="a plan", accuracy=0.97, step_ms=10.0, losses=[2.0, 1.0])
    return Report(
        settings=Settings(output=folder, json=folder / "out.json"),
        world=World(rank=0, size=2, device=CPU, backend="gloo"),
        plain=outcome,
        overlapped=outcome,
        parity=parity,
        exact=True,
    )
