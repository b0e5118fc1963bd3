"""Each part of `make gpu` runs on a CPU, and finds what it is to find."""

from __future__ import annotations

import io
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import worker
from benchmarks.gpu.given import Given, Spec
from benchmarks.gpu.parts import checks, kernels, ratios, tests
from benchmarks.gpu.plan import PARTS
from benchmarks.gpu.report import PartReport
from benchmarks.gpu.trained import Trainee
from benchmarks.simulated import SimulatedLink
from harness import run_ranks

FAR_AWAY = 4e9  # In Unix time.


def _work(rank: int, world_size: int, spec: Path) -> None:
    assert worker.main(str(spec), rank, str(spec.with_name(f"lines{rank}"))) == 0


def _spec(folder: Path, name: str) -> Spec:
    (part,) = (one for one in PARTS if one.name == name)
    return Spec(
        module=part.module_name, device="cpu", size="least", ranks=part.ranks, skip=(), until=FAR_AWAY,
        scratch=str(folder), shared=str(folder), folder=str(folder),
    )  # fmt: skip


def play(name: str, folder: Path) -> PartReport:
    """What the part of that name says that it found."""
    spec = _spec(folder, name)
    path = folder / "spec.json"
    path.write_text(json.dumps(asdict(spec)))
    run_ranks(_work, spec.ranks, path, backend=None, timeout_s=120)
    return found_in((folder / "lines0").read_text())


def found_in(lines: str) -> PartReport:
    """What a worker has said that it found; every case must have gone well."""
    found = PartReport(name="", title="")
    for line in lines.splitlines():
        said: dict[str, Any] = json.loads(line)
        found.add(said["event"], said)
        if said["event"] == "done":
            assert (said["status"], said["why"]) == ("ok", ""), said["case"]
    return found


def test_checks_are_counted(tmp_path: Path) -> None:
    given = Given(spec=_spec(tmp_path, "checks"), rank=0, lines=io.StringIO(), case="parity")
    checks.run("parity", given)
    tables = found_in(given.lines.getvalue()).tables
    assert tables["Checks"] == [
        {"topic": "parity", "checks": 2, "passed": 2, "failed": 0, "hung": 0, "died": 0, "skipped": 0}
    ]
    first = tables["Parity"][0]
    assert first["check"] == "AllReduce, Step" and first[""] == "passed" and first["parameter difference"] == 0


def test_the_error_is_shown_and_not_the_advice_behind_it() -> None:
    detail = (
        "rank 1: Traceback (most recent call last):\n  File ...\n"
        "torch.AcceleratorError: CUDA error: misaligned address\n"
        "Search for `cudaErrorMisalignedAddress' in https://docs.nvidia.com for more information.\n\n(rank 0 hung)"
    )
    assert checks._last_error(detail) == "torch.AcceleratorError: CUDA error: misaligned address"


def test_peaks_are_in_megabytes_however_small() -> None:
    peaks = {"parameter_bytes": 33_600_000, "ZeroStep": 12_288}
    assert checks._figures("memory", peaks) == {"parameter": 33.6, "ZeroStep": 0.01}


def test_synchronizations_are_counted_chain_by_chain(tmp_path: Path) -> None:
    (rows,) = play("waits", tmp_path).tables.values()
    assert [row["chain"] for row in rows] == ["plain DDP", "AllReduce, Step"]
    plain, chained = (row["values read"] for row in rows)
    # Fused AdamW reads its step counts on a CPU; a chain reads nothing besides.
    assert plain > 0 and chained <= plain


def test_the_timeline_has_its_figures_a_trace_and_a_picture(tmp_path: Path) -> None:
    found = play("timeline", tmp_path)
    ((title, rows),) = found.tables.items()
    assert "2 ranks, 1 Gbit/s" in title
    for row in rows:
        assert 0 <= row["update hidden ms"] <= row["update ms"] <= row["step ms"]
        assert 0 <= row["exposed ms"] <= row["communication ms"] <= row["step ms"]
    assert found.files == ["timeline.json", "timeline.png"]
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]


def test_steps_are_timed_beside_the_baseline(tmp_path: Path) -> None:
    found = play("ratios", tmp_path)
    (rows,) = found.tables.values()
    assert [row["variant"] for row in rows] == ["compute-only", "ddp-adamw-fused", "overlap-step-adamw"]
    assert rows[1]["1 Gbit/s"].endswith("(1.00)") and rows[1]["sent MB"] == rows[2]["sent MB"] > 0
    figures = found.data["gpt-small|overlap-step-adamw|1"]
    assert figures["p25_ms"] <= figures["median_ms"] <= figures["p75_ms"] and figures["samples"] == 3


class _Timed(ratios._Timed):
    def sample_ms(self, trainee: Any) -> float:
        if self.name != "ddp-adamw-fused" and len(self.samples_ms) == 1:
            raise AssertionError("Missing at least one broadcast handle")
        return 1.0


def test_a_variant_that_raises_while_it_is_timed_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ratios, "_link", SimulatedLink(bandwidth_bytes_per_s=1e9), raising=False)
    given = Given(spec=_spec(tmp_path, "ratios"), rank=0, lines=io.StringIO())
    trainee: Any = Trainee("gpt-small", torch.device("cpu"))
    loop: Any = None
    group = [_Timed(name, loop) for name in ("torch-zero-adamw", "ddp-adamw-fused", "overlap-step-adamw")]
    ratios._time_on(1.0, group, trainee, given, share_s=100.0)
    (rows,) = found_in(given.lines.getvalue()).tables.values()
    raised = "raised while it was timed: AssertionError: Missing at least one broadcast handle"
    cells = {row["variant"]: row.get("1 Gbit/s", row.get("")) for row in rows}
    assert cells == {"torch-zero-adamw": raised, "overlap-step-adamw": raised, "ddp-adamw-fused": "1.0 (1.00)"}
    assert [one.split(":")[0] for one in given.failures] == ["overlap-step-adamw"]


def test_kernels_are_timed(tmp_path: Path) -> None:
    wires, reducers = play("kernels", tmp_path).tables.values()
    assert [row["wire"] for row in wires] == ["BFloat16(), plain", "Int8(), plain", "Int4(), plain"]
    assert all(row["encode ms"] > 0 and row["decode ms"] > 0 for row in wires)
    assert [round(row["bytes"], 2) for row in wires] == [0.5, 0.25, 0.13]
    assert all(row["ms"] > 0 for row in reducers) and len(reducers) == 3


def test_a_wire_is_timed_as_torch_compile_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What the compiler makes of it is its own affair, and takes seconds.
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(kernels, "_device", torch.device("cpu"), raising=False)
    given = Given(spec=_spec(tmp_path, "kernels"), rank=0, lines=io.StringIO(), case="Int8(), torch.compile")
    kernels.run(given.case, given)
    ((row,),) = found_in(given.lines.getvalue()).tables.values()
    assert row["wire"] == "Int8(), torch.compile" and row["encode ms"] > 0 and row["decode ms"] > 0


class _Event:
    def __init__(self, enable_timing: bool) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: object) -> float:
        return 1.0


def test_a_gpu_is_busy_for_as_long_as_the_host_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cycles: list[int] = []
    monkeypatch.setattr(kernels, "_device", torch.device("cuda"), raising=False)
    monkeypatch.setattr(kernels, "spin", cycles.append)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    given = Given(spec=_spec(tmp_path, "kernels"), rank=0, lines=io.StringIO())
    assert kernels._time_ms(lambda: time.sleep(0.02), given) == 1.0
    assert len(cycles) == given.sizes.kernel_repeats and all(one / 2e9 >= 0.04 for one in cycles)


def test_tests_that_are_marked_for_gpus_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tests, "_TESTS", tmp_path)
    monkeypatch.setattr(tests, "_ROOT", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu: needs one")
    (tmp_path / "test_of_one.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\n"
        "def test_passes(): pass\ndef test_fails(): assert False\n@pytest.mark.skip\ndef test_is_skipped(): pass\n"
    )
    given = Given(spec=_spec(tmp_path, "tests"), rank=0, lines=io.StringIO(), case="test_of_one.py")
    tests.run("test_of_one.py", given)
    assert given.failures == ["failed: test_fails"]
    last = json.loads(given.lines.getvalue().splitlines()[-1])
    assert last["cells"] == {"tests": "test_of_one.py", "passed": 1, "failed": 1, "error": 0, "skipped": 1}


def test_a_file_that_only_writes_of_the_mark_is_not_among_the_tests_for_gpus() -> None:
    names = {path.name for path in tests._files()}
    assert "test_cuda.py" in names and "test_parts.py" not in names
