"""A short campaign with one seed: a fault of each kind, spread over the forms."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from soak.__main__ import read

PAIRS = (
    ("chain, Step", "SIGKILL"),
    ("ZeroStep, gathered in forward", "exception in a stage"),
    ("PowerSGD", "killed in a save"),
    ("LocalSGD", "out of memory"),
    ("Join", "SIGTERM, handled"),
    ("ZeroStep, gathered in backward", "SIGSTOP"),
)


@pytest.mark.timeout(600)
def test_faults_are_survived_and_runs_resume_bit_for_bit(tmp_path: Path) -> None:
    pairs = [word for pair in PAIRS for word in ("--pair", *pair)]
    options = ["--seed", "23837", "--trials", str(len(PAIRS)), "--out", str(tmp_path)]
    argv = [sys.executable, "-m", "soak", *options, *pairs]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    trials = read(tmp_path / "trials.jsonl")
    assert [(trial["form"], trial["fault"]) for trial in trials] == list(PAIRS), done.stdout + done.stderr
    assert done.returncode == 0, done.stdout
    assert all(trial["resumed_exactly"] for trial in trials), done.stdout
    assert sum(trial["met"] for trial in trials) >= len(PAIRS) - 1, "a fault that comes after the end tries nothing"
    assert f"{len(PAIRS)} clean, {len(PAIRS)} resumed bit for bit" in (tmp_path / "report.md").read_text()
