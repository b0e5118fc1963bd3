"""`overlap demo`: every option trains what it says, the whole command saves what it found, and the verdict is right."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from overlap.demo.experiment import (
    Outcome,
    Parity,
    Report,
    largest_difference,
    load_digits,
    load_torchvision,
    present,
    shard,
    train_and_compare,
)  # fmt: skip
from overlap.demo.settings import TRAIN_IMAGES, Settings
from overlap.errors import ConfigurationError

# As little as it takes to have a second step, with the buckets that DDP rebuilds after the first.
TINY = ["--images", "48", "--epochs", "1", "--batch-size", "8", "--image-size", "16"]
SMALL = {"images": 32, "epochs": 1, "batch_size": 8, "image_size": 16}
# By name: the options, and the chain that is registered for them.
EXACT = {
    "uneven": (Settings(uneven=True, **SMALL | {"epochs": 2}), "chain(AllReduce(), Step(SGD, interleaved))"),
    "uneven zero": (Settings(uneven=True, zero=True, **SMALL), "chain(ZeroStep(SGD, interleaved))"),
    "zero adamw": (Settings(zero=True, optimizer="adamw", **SMALL), "chain(ZeroStep(AdamW, interleaved))"),
}
ROUNDED = {
    "bf16 adamw": (
        Settings(bf16_gradients=True, optimizer="adamw", **SMALL),
        "chain(Cast(bfloat16, AllReduce()), Step(AdamW, interleaved))",
    ),
    "powersgd zero": (
        Settings(powersgd=2, zero=True, **SMALL),
        "chain(PowerSGD(rank=2), ZeroStep(SGD, interleaved)), without momentum, learning rate 0.1",
    ),
    "quantize": (Settings(wire="int8", **SMALL), "chain(Quantize(Int8()), Step(SGD, interleaved))"),
    "uneven local sgd": (
        Settings(uneven=True, local_sgd=2, **SMALL | {"epochs": 2}),
        "LocalSGD(SGD, period 2 from step 2)",
    ),
}


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any], Path]:
    """One run of two ranks, what it printed and what it saved."""
    folder = tmp_path_factory.mktemp("demo")
    saved = folder / "sub" / "out.json"
    typed = [sys.executable, "-m", "overlap", "demo", *TINY, "--seed", "3", "--device", "cpu"]
    done = subprocess.run(
        [*typed, "--output", folder, "--json", saved], check=False, capture_output=True, text=True, timeout=120
    )
    assert saved.exists(), done.stdout + done.stderr
    return done, json.loads(saved.read_text()), folder


def test_two_ranks_end_up_equal(command: Any) -> None:
    done, results, folder = command
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Equal: parameters, optimizer state and buffers are the same in every bit." in done.stdout
    assert "step/s" in done.stderr
    assert results["parity_max_abs_diff"] == 0 and results["must_be_equal"] and results["passed"]
    assert len(results["loss_plain"]) == 3 and results["loss_plain"] == results["loss_overlapped"]
    assert results["accuracy_plain"] == results["accuracy_overlapped"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_json_has_what_ran_and_how_long_a_step_took(command: Any) -> None:
    _, results, _ = command
    assert results["plan_overlapped"] == "chain(AllReduce(), Step(SGD, interleaved))"
    assert results["step_ms_plain"] > 0 and results["step_ms_overlapped"] > 0
    assert results["settings"]["seed"] == 3
    assert results["machine"]["ranks"] == 2
    assert set(results) == {
        "passed", "verdict", "must_be_equal", "parity_max_abs_diff", "parity_parameters_max_abs_diff",
        "parity_optimizer_state_max_abs_diff", "parity_buffers_max_abs_diff", "accuracy_plain", "accuracy_overlapped",
        "step_ms_plain", "step_ms_overlapped", "step_ratio", "loss_plain", "loss_overlapped", "plan_plain",
        "plan_overlapped", "settings", "machine",
    }  # fmt: skip


def _train(rank: int, world_size: int, asked: dict[str, Settings]) -> dict[str, Report]:
    return {name: train_and_compare(settings, torch.device("cpu")) for name, settings in asked.items()}


def test_the_options_decide_what_is_registered_and_exact_ones_end_up_equal() -> None:
    asked = {name: settings for name, (settings, _) in (EXACT | ROUNDED).items()}
    reports: dict[str, Report] = run_ranks(_train, 2, asked, timeout_s=150)[0]
    assert {name: one.overlapped.description for name, one in reports.items()} == {
        name: description for name, (_, description) in (EXACT | ROUNDED).items()
    }
    for name in EXACT:
        report = reports[name]
        assert report.must_be_equal and report.passed and report.parity.largest == 0
        assert report.plain.losses == report.overlapped.losses
    for name in ROUNDED:
        assert not reports[name].must_be_equal and 0 < reports[name].parity.parameters < 1
    assert "these gradients are compressed" in reports["quantize"].verdict()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bf16_gradients": True, "powersgd": 2}, "--bf16-gradients and --powersgd are ways"),
        ({"zero": True, "local_sgd": 2}, "--zero shares out"),
        ({"diloco": True}, "give --local-sgd PERIOD"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Settings(**options)


def _report(parity: Parity, folder: Path) -> Report:
    outcome = Outcome(description="a chain", accuracy=0.97, step_ms=10.0, losses=[2.0, 1.0])
    return Report(
        settings=Settings(output=folder, json=folder / "out.json"),
        ranks=2,
        device=torch.device("cpu"),
        plain=outcome,
        overlapped=outcome,
        parity=parity,
        exact=True,
    )


@pytest.mark.parametrize("difference", [1e-9, math.inf])
def test_runs_that_differ_fail(difference: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert present(_report(Parity(0.0, difference, 0.0), tmp_path)) == 1
    assert "NOT EQUAL" in capsys.readouterr().out
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["parity_max_abs_diff"] == (difference if math.isfinite(difference) else None)
    assert not saved["passed"]


def test_rounded_runs_pass_or_fail_by_accuracy(tmp_path: Path) -> None:
    rounded = dataclasses.replace(_report(Parity(0.1, 0.1, 0.1), tmp_path), exact=False)
    assert rounded.passed
    worse = dataclasses.replace(rounded, overlapped=dataclasses.replace(rounded.overlapped, accuracy=0.9))
    assert not worse.passed and worse.verdict().startswith("LESS ACCURATE")


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
def test_the_largest_difference_is_infinite_where_a_value_is_missing_or_not_finite(
    other: dict[str, object], difference: float
) -> None:
    one = {"weight": torch.tensor([1.0, 2.0]), "step": 3, "empty": None}
    assert largest_difference(one, other) == difference


def test_ranks_share_out_every_image_once_in_an_order_of_each_epoch() -> None:
    digits = load_digits(image_size=8, images=TRAIN_IMAGES, device=torch.device("cpu"))
    assert digits.train_images.shape == (TRAIN_IMAGES, 3, 8, 8)
    assert digits.train_images.min() == -1 and digits.train_images.max() == 1
    assert len(digits.train_labels) + len(digits.test_labels) == 1797
    numbered = dataclasses.replace(digits, train_labels=torch.arange(TRAIN_IMAGES))

    def images(rank: int, epoch: int = 0) -> list[int]:
        batches = shard(numbered, epoch=epoch, seed=0, rank=rank, ranks=2, batch_size=32)
        return torch.cat([own for _, own in batches]).tolist()  # type: ignore[no-any-return]

    first, second = images(0), images(1)
    assert len(first) == len(second) == 22 * 32
    assert len(set(first + second)) == len(first + second)
    assert images(0) == first != images(0, epoch=1)


def test_torchvision_is_there_whatever_it_was_built_for() -> None:
    torchvision = load_torchvision()
    assert torchvision is load_torchvision()
    assert torchvision.models.resnet18(num_classes=10).fc.out_features == 10
