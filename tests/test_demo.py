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

from harness import run_ranks
from overlap._torchvision import load_torchvision
from overlap.demo.data import load_digits, shard
from overlap.demo.experiment import present, train_and_compare
from overlap.demo.parity import Parity, largest_difference
from overlap.demo.report import Outcome, Report
from overlap.demo.settings import TRAIN_IMAGES, Settings
from overlap.errors import ConfigurationError
from overlap.launch import World

# As little as it takes to have a second step, with the buckets that DDP rebuilds after the first.
TINY = ["--images", "48", "--epochs", "1", "--batch-size", "8", "--image-size", "16"]
SMALL = {"images": 32, "epochs": 1, "batch_size": 8, "image_size": 16}
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


# Options of a recipe, whether its result is the plain run's in every bit, and what it runs.
RECIPES = [
    (Settings(uneven=True, **SMALL | {"epochs": 2}), True, "chain(AllReduce(), Step(SGD, interleaved))"),
    (Settings(uneven=True, zero=True, **SMALL), True, "chain(ZeroStep(SGD, interleaved))"),
    (Settings(uneven=True, local_sgd=2, **SMALL | {"epochs": 2}), False, "LocalSGD(SGD, period 2 from step 2)"),
    (Settings(zero=True, optimizer="adamw", **SMALL), True, "chain(ZeroStep(AdamW, interleaved))"),
    (
        Settings(bf16_gradients=True, optimizer="adamw", **SMALL),
        False,
        "chain(Cast(bfloat16, AllReduce()), Step(AdamW, interleaved))",
    ),
    (Settings(powersgd=2, zero=True, **SMALL), False, "chain(PowerSGD(rank=2), ZeroStep(SGD, interleaved))"),
    (Settings(local_sgd=2, **SMALL | {"epochs": 2}), False, "LocalSGD(SGD, period 2 from step 2)"),
    (Settings(quantize=8, **SMALL), False, "chain(Quantize(bits=8), Step(SGD, interleaved))"),
]


def test_every_recipe_trains() -> None:
    reports, _ = run_ranks(_train_recipes, 2, [settings for settings, _, _ in RECIPES], timeout_s=150)
    for report, (settings, is_exact, description) in zip(reports, RECIPES, strict=True):
        assert report.overlapped.description == description, settings
        assert report.must_be_equal == is_exact, settings
        if is_exact:
            assert report.passed and report.parity.largest == 0, settings
            assert report.plain.losses == report.overlapped.losses
        else:
            assert 0 < report.parity.parameters < 1, settings
            assert settings.local_sgd or "these gradients are compressed" in report.verdict()


def _train_recipes(rank: int, world_size: int, asked: list[Settings]) -> list[Report]:
    world = World(rank=rank, size=world_size, device=CPU, backend="gloo")
    return [train_and_compare(settings, world) for settings in asked]


def test_gradients_are_sent_in_one_way() -> None:
    with pytest.raises(ConfigurationError, match="--bf16-gradients and --powersgd are ways"):
        Settings(bf16_gradients=True, powersgd=2)
    with pytest.raises(ConfigurationError, match="--zero shares out"):
        Settings(zero=True, local_sgd=2)


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
    outcome = Outcome(description="a chain", accuracy=0.97, step_ms=10.0, losses=[2.0, 1.0])
    return Report(
        settings=Settings(output=folder, json=folder / "out.json"),
        world=World(rank=0, size=2, device=CPU, backend="gloo"),
        plain=outcome,
        overlapped=outcome,
        parity=parity,
        exact=True,
    )
