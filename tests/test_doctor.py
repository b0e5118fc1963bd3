"""`overlap doctor`: what it prints, and when it says that something is not compatible."""

import subprocess
import sys

import pytest
import torch

import overlap
from overlap import doctor
from overlap.cli import main


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without a process group: what that finds is in the tests' hands."""
    monkeypatch.setattr(doctor, "compare_with_plain", lambda: 0)
    return monkeypatch


def test_this_installation_works_and_a_report_has_what_is_needed() -> None:
    done = subprocess.run([sys.executable, "-m", "overlap", "doctor"], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "No problem found."
    for words in (overlap.__version__, torch.__version__, "gloo", "GPUs", "equal in every bit"):
        assert words in done.stdout
    assert len(done.stdout.splitlines()) <= 24, "it is to fit one screen"


def test_a_result_that_differs_and_a_failure_are_problems(
    quick: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick.setattr(doctor, "compare_with_plain", lambda: 3)
    assert main(["doctor"]) == 1
    assert "3 parameters differ between a chain and a plain loop" in capsys.readouterr().out

    def fail() -> int:
        raise RuntimeError("no hook")

    quick.setattr(doctor, "compare_with_plain", fail)
    assert main(["doctor"]) == 1
    assert "do not work here: RuntimeError: no hook" in capsys.readouterr().out


def test_an_old_torch_and_one_queue_are_problems(quick: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    quick.setattr(torch, "__version__", "2.9.1+cu128")
    quick.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "PROBLEM: torch 2.9.1+cu128 is too old: install 2.13 or later" in shown
    assert "PROBLEM: CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams of a GPU into one queue" in shown


def test_on_gpus_the_environment_is_shown_with_what_it_lacks(
    quick: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quick.setattr(torch.cuda, "device_count", lambda: 2)
    quick.setattr(torch.cuda, "get_device_name", lambda index: f"H100 number {index}")
    quick.setattr(torch.distributed, "is_backend_available", lambda name: name in ("gloo", "nccl", "nccl2"))
    quick.setattr(torch.distributed.Backend, "backend_list", ["undefined", "gloo", "nccl", "nccl2", "fake"])
    quick.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT", "NCCL_ALGO"):
        quick.delenv(name, raising=False)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 24, "it is to fit one screen"
    for words in ("gloo, nccl, nccl2\n", "H100 number 1", "2.27.3", "export NCCL_LAUNCH_ORDER_IMPLICIT=1", "=^NVLS"):
        assert words in shown
    quick.setattr(torch.cuda.nccl, "version", lambda: (2, 25, 1))
    quick.setenv("NCCL_ALGO", "^NVLS")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "install NCCL 2.26 or later" in shown and "equal in every bit" not in shown.partition("NCCL_ALGO")[2][:60]
