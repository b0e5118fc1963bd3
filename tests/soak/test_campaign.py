"""A short campaign with one seed: every kind of fault once, spread over the forms."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from soak.report import markdown, read, summary, write_into

PAIRS = (
    ("chain, Step", "SIGKILL"),
    ("ZeroStep, gathered in forward", "exception in a stage"),
    ("PowerSGD", "killed in a save"),
    ("Quantize", "full disk"),
    ("LocalSGD", "out of memory"),
    ("Join, polled", "SIGTERM, handled"),
    ("ZeroStep, gathered in backward", "SIGSTOP"),
)


@pytest.mark.timeout(600)
def test_faults_are_survived_and_runs_resume_bit_for_bit(tmp_path: Path) -> None:
    words = [word for pair in PAIRS for word in ("--pair", *pair)]
    argv = [sys.executable, "-m", "soak", "--seed", "19", "--trials", str(len(PAIRS)), "--out", str(tmp_path), *words]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=False)
    trials = read([tmp_path / "trials.jsonl"])
    assert [(trial["form"], trial["fault"]) for trial in trials] == list(PAIRS), done.stdout + done.stderr
    assert done.returncode == 0, done.stdout
    assert all(trial["resumed_exactly"] for trial in trials), done.stdout
    assert sum(trial["met"] for trial in trials) >= len(PAIRS) - 1, "a fault that comes after the end tries nothing"


def _trial(seed: str, form: str, fault: str, **other: Any) -> dict[str, Any]:
    return {
        "seed": seed, "form": form, "fault": fault, "met": True, "unclean": [], "slowest_s": 0.5,
        "resumed_exactly": True, **other,
    }  # fmt: skip


def test_the_table_merges_campaigns_and_counts_plain_ddp_apart(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    bad = _trial("a:1", "PowerSGD", "SIGKILL", unclean=["rank 1 hung"], resumed_exactly=False)
    first.write_text("".join(json.dumps(trial) + "\n" for trial in (_trial("a:0", "PowerSGD", "SIGKILL"), bad)))
    second.write_text(json.dumps(_trial("b:0", "plain DDP", "SIGKILL", unclean=["rank 1 hung"])) + "\n")
    table = summary(read([first, second, tmp_path / "not there"]))
    assert (table["trials"], table["clean"], table["resumed exactly"], table["for comparison"]) == (2, 1, 1, 1)
    assert table["why"] == {"a rank was still waiting long after the timeout": 1}
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- soak: begin -->\nold\n<!-- soak: end -->\nafter\n")
    write_into(page, markdown(read([first, second])))
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| SIGKILL | 0/1, 0.5 | 1/2, 0.5 |" in text
