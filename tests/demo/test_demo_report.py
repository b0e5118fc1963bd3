"""The verdict on two runs: printed, saved, and an exit code."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from overlap.demo.experiment import present
from overlap.demo.parity import Parity
from overlap.demo.report import Outcome, Report
from overlap.demo.settings import Settings
from overlap.launch import World


def _report(parity: Parity, folder: Path) -> Report:
    outcome = Outcome(description="a chain", accuracy=0.97, step_ms=10.0, losses=[2.0, 1.0])
    return Report(
        settings=Settings(output=folder, json=folder / "out.json"),
        world=World(rank=0, size=2, device=torch.device("cpu"), backend="gloo"),
        plain=outcome,
        overlapped=outcome,
        parity=parity,
        exact=True,
    )


@pytest.mark.parametrize("difference", [1e-9, math.inf])
def test_runs_that_differ_fail(difference: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = _report(Parity(parameters=0.0, optimizer_state=difference, buffers=0.0), tmp_path)
    assert present(report) == 1
    assert "NOT EQUAL" in capsys.readouterr().out
    saved = json.loads((tmp_path / "out.json").read_text())
    assert saved["parity_max_abs_diff"] == (difference if math.isfinite(difference) else None)
    assert not saved["passed"]


def test_rounded_runs_that_are_as_accurate_pass(tmp_path: Path) -> None:
    assert dataclasses.replace(_report(Parity(0.1, 0.1, 0.1), tmp_path), exact=False).passed


def test_rounded_runs_fail_when_the_overlapped_is_less_accurate(tmp_path: Path) -> None:
    rounded = dataclasses.replace(_report(Parity(0.1, 0.1, 0.1), tmp_path), exact=False)
    worse = dataclasses.replace(rounded, overlapped=dataclasses.replace(rounded.overlapped, accuracy=0.9))
    assert not worse.passed
    assert worse.verdict().startswith("LESS ACCURATE")
