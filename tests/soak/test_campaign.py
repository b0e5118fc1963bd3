"""A short campaign with one seed: a fault of each kind, spread over the forms."""

from __future__ import annotations

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
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    campaigns = {}
    for half in (PAIRS[::2], PAIRS[1::2]):  # Both at once: ranks mostly wait.
        out = tmp_path / f"{len(campaigns)}"
        argv = [sys.executable, "-m", "soak", "--seed", "23837", "--trials", str(len(half)), "--out", str(out)]
        argv += [word for pair in half for word in ("--pair", *pair)]
        campaigns[half] = out, subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    met = 0
    for half, (out, process) in campaigns.items():
        said = process.communicate()[0].decode()
        trials = read(out / "trials.jsonl")
        assert [(trial["form"], trial["fault"]) for trial in trials] == list(half), said
        assert process.returncode == 0, said
        assert all(trial["resumed_exactly"] for trial in trials), said
        assert f"{len(half)} clean, {len(half)} resumed bit for bit" in (out / "report.md").read_text()
        met += sum(trial["met"] for trial in trials)
    assert met >= len(PAIRS) - 1, "a fault that comes after the end tries nothing"
