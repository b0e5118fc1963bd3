"""The examples with frameworks' loops learn the same with overlap as without."""

from __future__ import annotations

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


def test_the_loop_of_accelerate(tmp_path: Path) -> None:
    runs = ["--plain", "", f"--output-dir {tmp_path} --epochs 2", f"--output-dir {tmp_path} --resume 2"]
    for plain, ours, first, rest in _printed("accelerate_loop.py", *runs):
        assert len(plain) == 3 and plain == ours
        assert (len(first), len(rest)) == (2, 1) and first + rest == ours


def test_the_module_of_lightning(tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints" / "epoch=0-step=4.ckpt"
    runs = ["--plain", "", f"--output-dir {tmp_path} --epochs 1", f"--resume {saved}"]
    for plain, ours, first, rest in _printed("lightning_module.py", *runs):
        assert len(plain) == 2 and plain == ours
        assert first + rest == ours


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    runs = ["--plain", "", f"--output-dir {tmp_path} --epochs 1", f"--output-dir {tmp_path} --resume"]
    for plain, ours, _, rest in _printed("hf_trainer.py", *runs):
        assert len(plain) == 1 and plain == ours
        assert _weights(rest) == _weights(ours)


def _weights(lines: list[str]) -> str:
    (line,) = lines
    return line.partition("weights ")[2]


def test_every_example_with_a_framework_is_run() -> None:
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*_example*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in source
