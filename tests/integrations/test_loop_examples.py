"""The examples with frameworks' loops learn the same with overlap as without."""

import contextlib
import io
import os
import re
import runpy
import socket
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from comparing import prepare_rank

from harness import run_ranks

EXAMPLES = Path(__file__).parent.parent.parent / "examples" / "frameworks"


def _run(rank: int, world_size: int, example: str, runs: list[str], port: int) -> list[list[str]]:
    """What an example prints on this rank, run with each of these arguments."""
    prepare_rank(rank, world_size)
    os.environ["MASTER_PORT"] = str(port)
    if dist.is_initialized():  # An example joins the group that is there, and leaves it to the next.
        dist.init_process_group = dist.destroy_process_group = lambda *backend: None
    printed = []
    for arguments in runs:
        sys.argv = [str(EXAMPLES / example), *arguments.split()]
        with contextlib.redirect_stdout(io.StringIO()) as output:
            runpy.run_path(sys.argv[0], run_name="__main__")
        printed.append([line for line in output.getvalue().splitlines() if line.startswith("rank ")])
    return printed


def _printed(example: str, *runs: str, backend: str | None = "gloo") -> list[list[list[str]]]:
    """For each rank and each run, the lines."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return run_ranks(_run, 2, example, list(runs), port, backend=backend)


def test_a_loop_in_the_manner_of_timm() -> None:
    for plain, ours in _printed("timm_loop.py", "--plain", ""):
        assert len(plain) == 1 and plain == ours


def test_a_script_in_the_manner_of_torchvisions_references(tmp_path: Path) -> None:
    runs = ["--plain", "", "--powersgd"]
    runs += [f"--powersgd --output-dir {tmp_path} --epochs 1", f"--powersgd --output-dir {tmp_path} --resume"]
    for plain, ours, whole, first, rest in _printed("torchvision_reference.py", *runs):
        assert len(plain) == 3 and plain == ours
        assert whole != ours
        # The first pass after a resume runs in other buckets, in which PowerSGD rounds in other places.
        assert _numbers(first + rest) == pytest.approx(_numbers(whole), rel=1e-5)


def _numbers(lines: list[str]) -> list[float]:
    return [float(number) for line in lines for number in re.findall(r"\d+\.\d+", line)]


def test_the_trainer_of_ignite() -> None:
    plain = _printed("ignite_trainer.py", "--plain", backend=None)
    assert all(len(lines) == 2 for (lines,) in plain)
    assert _printed("ignite_trainer.py", "", backend=None) == plain


RESUMED = {
    # By example: lines of a whole run, where a run is broken off, and how it is resumed.
    "accelerate_loop.py": (3, "--epochs 2", "--resume 2"),
    "lightning_module.py": (2, "--epochs 1", "--resume {folder}/checkpoints/epoch=0-step=4.ckpt"),
    "hf_trainer.py": (1, "--epochs 1", "--resume"),
}


@pytest.mark.parametrize("example", RESUMED)
def test_an_example_learns_as_plain_and_goes_on_from_its_checkpoint(example: str, tmp_path: Path) -> None:
    lines, stopped, resumed = RESUMED[example]
    runs = [f"--output-dir {tmp_path} {options.format(folder=tmp_path)}" for options in (stopped, resumed)]
    for plain, ours, first, rest in _printed(example, "--plain", "", *runs):
        assert len(plain) == lines and plain == ours
        if lines == 1:  # At the end of all, with a loss that is the mean over a run.
            assert rest[0].partition("weights ")[1:] == ours[0].partition("weights ")[1:]
        else:
            assert first and rest and first + rest == ours


def test_every_example_with_a_framework_is_run() -> None:
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*_example*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in source
