"""Children that may do anything to their process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from overlap.bench.job import Outcome, first_failure

_JOBS = """
import json, os, sys, time
from dataclasses import asdict
from pathlib import Path
from overlap.bench.job import run_job

def refuse(terminal):
    raise TypeError("only on\\nNCCL")

def abort(terminal):
    os.write(2, b"terminate called after throwing an instance of 'E'\\n  what():  8 vs 4\\nmore\\n")
    os.abort()

jobs = {"value": (lambda terminal: [1, 2], 20), "refuse": (refuse, 20), "abort": (abort, 20),
        "hang": (lambda terminal: time.sleep(60), 0.5), "leave": (lambda terminal: os._exit(3), 20)}
folder = Path(sys.argv[1])
print(json.dumps({name: asdict(run_job(job, folder, name, limit_s=s)) for name, (job, s) in jobs.items()}))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    # In a process of its own: pytest has threads, and those do not go well with forks.
    command = [sys.executable, "-c", _JOBS, str(tmp_path_factory.mktemp("jobs"))]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    return {name: Outcome(**fields) for name, fields in json.loads(done.stdout).items()}


def test_a_job_returns_its_value(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["value"] == Outcome(value=[1, 2])


def test_a_job_that_raises_refuses_in_one_line(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["refuse"].failure == "refuses: TypeError: only on"


def test_a_job_that_aborts_crashes_with_the_reason_that_it_printed(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["abort"].failure == "crashes: SIGABRT: 8 vs 4" and outcomes["abort"].died


def test_a_job_that_hangs_is_stopped(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["hang"].failure == "hangs: stopped after 0 s"


def test_a_job_that_leaves_without_a_word_crashes_with_its_exit_code(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["leave"].failure == "crashes: exit code 3"


# Which rank failed first -------------------------------------------------------------------------------------

FINE = Outcome(value=1)
CLOSED = Outcome(failure="refuses: RuntimeError: Connection closed by peer [::1]:1", at=1.0)
REFUSED = Outcome(failure="refuses: ValueError: no", at=2.0)
CRASHED = Outcome(failure="crashes: SIGABRT: 8 vs 4", at=3.0, died=True)


@pytest.mark.parametrize(
    ("ranks", "first"),
    [
        ([FINE, FINE], None),
        ([CLOSED, REFUSED], 1),
        ([CLOSED, REFUSED, CRASHED], 2),
        ([FINE, CLOSED], 1),
    ],
    ids=["none", "not the closed connection", "the crash", "the only one"],
)
def test_the_first_failure_is_not_what_the_survivors_saw(ranks: list[Outcome], first: int | None) -> None:
    assert first_failure(ranks) == first
