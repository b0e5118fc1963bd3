"""The whole command, on a model that takes milliseconds."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from overlap.bench.command import open_link
from overlap.bench.link import missing_requirement
from overlap.bench.settings import Settings
from overlap.cli import main

needs_root = pytest.mark.skipif(missing_requirement() is not None, reason=str(missing_requirement()))

_ROW_KEYS = {
    "variant",
    "median_ms",
    "p25_ms",
    "p75_ms",
    "ratio",
    "ratio_to_16bit",
    "baseline",
    "bytes_sent_per_step",
    "peak_memory_bytes",
    "exposed_ms",
    "floor_ms",
    "status",
}
# The mlp's weights: three layers of 512 x 512, one of 512 x 10, with biases.
_GRADIENT_BYTES = 4 * (3 * (512 * 512 + 512) + 512 * 10 + 10)
_SMALL = ["--model", "mlp", "--bucket-cap-mb", "1", "--steps", "3"]


def bench(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "overlap", "bench", "--device", "cpu", *_SMALL, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def namespaces_of(pid: int) -> list[str]:
    folder = Path("/run/netns")
    return sorted(path.name for path in folder.glob(f"overlap-{pid}-*")) if folder.is_dir() else []


def pids_in(namespace: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", namespace], check=False, capture_output=True, text=True)
    return [int(word) for word in listed.stdout.split()]


def ranks_of(pid: int) -> dict[str, list[int]]:
    """The processes of each rank of the benchmark `pid`."""
    return {
        name.rpartition("-")[2]: [rank for rank in pids_in(name) if b"--run-config" in command_of(rank)]
        for name in namespaces_of(pid)
    }


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Shaped:
    """One run on a shaped link, and what it left."""

    def __init__(self, folder: Path) -> None:
        self.plot = folder / "bench.png"
        file = folder / "bench.json"
        names = "overlap-step-adamw,overlap-fp16,torch-bf16"
        self.process = bench(
            "--bandwidth", "400mbit", "--variants", names, "--json", str(file), "--plot", str(self.plot)
        )
        self.output, self.errors = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, self.errors
        self.report: dict[str, Any] = json.loads(file.read_text())
        self.rows: dict[str, dict[str, Any]] = {row["variant"]: row for row in self.report["rows"]}


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Shaped:
    return Shaped(tmp_path_factory.mktemp("bench"))


@needs_root
def test_the_json_has_the_documented_shape(shaped: Shaped) -> None:
    assert set(shaped.report) == {"machine", "settings", "rows"}
    assert all(set(row) == _ROW_KEYS for row in shaped.report["rows"])


@needs_root
def test_rows_are_what_was_asked_for_and_its_baselines(shaped: Shaped) -> None:
    assert list(shaped.rows) == [
        "compute-only", "ddp-sgd", "ddp-adamw-fused", "overlap-step-adamw", "overlap-fp16", "torch-bf16",
    ]  # fmt: skip


@needs_root
def test_the_json_says_that_the_link_was_shaped(shaped: Shaped) -> None:
    assert shaped.report["settings"]["link"] == "namespaces"
    assert shaped.report["settings"]["simulated"] is False


@needs_root
def test_an_all_reduce_sends_what_theory_says(shaped: Shaped) -> None:
    for name, share in [("ddp-sgd", 1.0), ("overlap-step-adamw", 1.0), ("overlap-fp16", 0.5)]:
        # 2 N (W - 1) / W with two ranks is N.
        assert shaped.rows[name]["bytes_sent_per_step"] == pytest.approx(share * _GRADIENT_BYTES, rel=0.02), name
    assert shaped.rows["compute-only"]["bytes_sent_per_step"] < 0.001 * _GRADIENT_BYTES


@needs_root
def test_times_fit_the_link(shaped: Shaped) -> None:
    sending_ms = 1000 * _GRADIENT_BYTES / 50e6
    compute_ms = shaped.rows["compute-only"]["median_ms"]
    for name in ("ddp-sgd", "overlap-step-adamw"):
        row = shaped.rows[name]
        assert row["p25_ms"] <= row["median_ms"] <= row["p75_ms"]
        assert row["exposed_ms"] == pytest.approx(row["median_ms"] - compute_ms, abs=0.01)
        assert row["median_ms"] > 0.97 * sending_ms
        assert sending_ms < row["floor_ms"] < 1.02 * sending_ms + compute_ms
    assert shaped.rows["ddp-sgd"]["ratio"] == 1
    assert shaped.rows["overlap-fp16"]["ratio"] < 0.9


@needs_root
def test_what_adam_keeps_shows_in_its_memory(shaped: Shaped) -> None:
    # Two moments against one momentum: one more copy of the weights. Allocators round, and buckets come and go.
    more_bytes = shaped.rows["ddp-adamw-fused"]["peak_memory_bytes"] - shaped.rows["compute-only"]["peak_memory_bytes"]
    assert more_bytes > 1.5 * _GRADIENT_BYTES


@needs_root
def test_a_counterpart_that_refuses_is_a_row_that_says_so(shaped: Shaped) -> None:
    refused = shaped.rows["torch-bf16"]
    assert refused["status"].startswith("refuses: TypeError: BF16 all reduce communication hook required")
    assert refused["median_ms"] is None and refused["ratio"] is None
    assert refused["status"] in shaped.output


@needs_root
def test_the_table_is_printed(shaped: Shaped) -> None:
    assert "mlp, batch 8, 2 ranks, links of 400mbit" in shaped.output
    assert re.search(r"overlap-step-adamw +\d+\.\d +\d+\.\d - \d+\.\d ", shaped.output)


@needs_root
def test_the_picture_is_saved(shaped: Shaped) -> None:
    assert shaped.plot.read_bytes().startswith(b"\x89PNG")


@needs_root
def test_nothing_of_the_network_is_left_after_a_normal_end(shaped: Shaped) -> None:
    assert namespaces_of(shaped.process.pid) == []


@pytest.fixture
def running() -> Iterator[subprocess.Popen[str]]:
    """A benchmark whose ranks are at work."""
    process = bench("--bandwidth", "10mbit", "--variants", "ddp-sgd")
    deadline = time.monotonic() + 60
    # Not just whatever is setting up the network: the last rank itself.
    while not ranks_of(process.pid).get("r1"):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield process
    process.kill()
    process.communicate()


@needs_root
def test_nothing_is_left_after_ctrl_c(running: subprocess.Popen[str]) -> None:
    ranks = [pid for pids in ranks_of(running.pid).values() for pid in pids]
    running.send_signal(signal.SIGINT)
    assert running.wait(20) == 128 + signal.SIGINT
    assert namespaces_of(running.pid) == []
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


@needs_root
def test_nothing_is_left_after_a_rank_was_killed(running: subprocess.Popen[str]) -> None:
    os.kill(ranks_of(running.pid)["r1"][0], signal.SIGKILL)
    assert running.wait(20) == 128 + signal.SIGKILL
    assert running.stderr is not None
    assert "rank 1 died by SIGKILL" in running.stderr.read()
    assert namespaces_of(running.pid) == []


def test_without_root_loopback_is_measured_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with ExitStack() as stack:
        assert open_link(Settings(bandwidth="1gbit"), stack) == ("loopback", None)
    said = "overlap: cannot shape a link: network namespaces need root; measuring without a speed limit instead\n"
    assert capsys.readouterr().err == said


class Simulated:
    """One run on a simulated link between 4 ranks."""

    def __init__(self, folder: Path) -> None:
        file = folder / "bench.json"
        names = ["--variants", "overlap-step-adamw", "--json", str(file)]
        process = bench("--simulate", "--bandwidth", "1gbit", "--ranks", "4", *names)
        self.output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        self.report: dict[str, Any] = json.loads(file.read_text())
        self.rows: dict[str, dict[str, Any]] = {row["variant"]: row for row in self.report["rows"]}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    return Simulated(tmp_path_factory.mktemp("simulated"))


def test_a_simulated_link_is_called_one(simulated: Simulated) -> None:
    assert "SIMULATED link of 1gbit" in simulated.output
    assert simulated.report["settings"]["simulated"] is True


@pytest.mark.parametrize("name", ["ddp-adamw-fused", "overlap-step-adamw"])
def test_bytes_and_times_fit_the_simulated_link(simulated: Simulated, name: str) -> None:
    assert simulated.rows[name]["bytes_sent_per_step"] == pytest.approx(1.5 * _GRADIENT_BYTES, rel=0.001)
    assert simulated.rows[name]["median_ms"] > 1000 * 1.5 * _GRADIENT_BYTES / 125e6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "vgg"], "choose from"),
        (["--bandwidth", "fast"], "bandwidth='fast' is not a speed"),
        (["--variants", "ddp-sgd,dpp-adam"], "variants has dpp-adam; known are compute-only"),
        (["--ranks", "1"], "ranks=1 is too small: at least 2"),
        (["--simulate"], "simulate=True needs a bandwidth"),
        (["--json", "/nowhere/bench.json"], "lies in a folder that does not exist"),
    ],
)
def test_bad_options_are_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "--device", "cpu", "--model", "mlp", *options])
    assert left.value.code == 2
    errors = capsys.readouterr().err
    assert said in errors and errors.count("\n") == 1
