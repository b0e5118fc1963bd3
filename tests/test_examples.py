"""What a new user copies works as it stands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from overlap.launch import run_ranks

ROOT = Path(__file__).parent.parent


# Runs an example several times in one process, which can join a group from the environment only once.
_RUNS = """
import runpy, sys
import torch.distributed as dist
dist.init_process_group("gloo")
leave = dist.destroy_process_group
dist.init_process_group = dist.destroy_process_group = lambda *backend: None
for arguments in {runs!r}:
    sys.argv = [{path!r}, *arguments.split()]
    runpy.run_path({path!r}, run_name="__main__")
leave()
"""


def _output(example: str, *runs: str, capfd: pytest.CaptureFixture[str]) -> str:
    """What an example prints on two ranks when it is run with each of these arguments."""
    program = _RUNS.format(path=str(ROOT / "examples" / example), runs=runs)
    assert run_ranks([], 2, prefix=lambda rank: [sys.executable, "-c", program], timeout_s=150) == 0
    return capfd.readouterr().out


def test_the_smallest_loop_runs_on_two_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        run_ranks([], 2, prefix=lambda rank: [sys.executable, str(ROOT / "examples" / "train.py")], timeout_s=120) == 0
    )
    assert "rank 0: loss" in capfd.readouterr().out


def test_a_transformer_learns_the_same_as_with_plain_ddp(capfd: pytest.CaptureFixture[str]) -> None:
    runs = [f"--update {update} --steps 10 --layers 2" for update in ("plain", "overlapped", "sharded")]
    lines = [line for line in _output("transformer.py", *runs, capfd=capfd).splitlines() if "rank 0: loss" in line]
    assert len(lines) == 30
    plain, overlapped, sharded = ([line.partition("loss ")[2] for line in lines[at : at + 10]] for at in (0, 10, 20))
    assert float(plain[-1].split()[0]) < 0.8 * float(plain[0].split()[0])
    assert overlapped == plain
    assert sharded == plain


def test_every_example_is_run_here() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == {"train.py", "transformer.py"}


def test_the_readme_shows_the_example_as_it_is() -> None:
    program = (ROOT / "examples" / "train.py").read_text().split("\n\n", 1)[1]
    assert f"```python\n{program}```" in (ROOT / "README.md").read_text()
