"""`make gpu`: what breaks is reported and costs only itself, and the dry run says what it found."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import command
from benchmarks.gpu.markdown import markdown
from benchmarks.gpu.page import BEGIN, END, write_page
from benchmarks.gpu.plan import PARTS, Part
from benchmarks.gpu.report import CaseReport, PartReport, Report

ROOT = Path(__file__).parents[2]
HERE = "gpu_report"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of this folder, in the processes that run them."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))


def part(module: str, *, share: float = 1.0, ranks: int = 1) -> Part:
    return Part(name=module, title=f"Part {module}", about="", share=share, ranks=ranks, module=f"{HERE}.{module}")


def play(parts: list[Part], folder: Path, *, budget_s: float) -> dict[str, Any]:
    """What report.json holds of a run, by part."""
    command.run(parts, folder, device="cpu", size="least", budget_s=budget_s)
    return {one["name"]: one for one in json.loads((folder / "report.json").read_text())["parts"]}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("broken")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
        return play([part("no_start"), part("broken", share=20, ranks=2)], folder, budget_s=60), folder


def outcome(found: dict[str, Any], case: str) -> tuple[str, str]:
    (one,) = (one for one in found["cases"] if one["name"] == case)
    return one["status"], one["why"]


@pytest.mark.parametrize(
    ("case", "status", "why"),
    [
        ("fine", "ok", ""),
        ("raises", "failed", "ValueError: on purpose, in two lines"),
        ("aborts", "crashed", "died by SIGABRT: Fatal Python error: Aborted"),
        ("is killed", "crashed", "died by SIGKILL"),
        ("hangs", "hung", "stopped after"),
        ("is wrong", "failed", "it is 1 and should be 2"),
        ("cannot run", "not run", "there is no GPU"),
        ("one rank raises", "failed", "ValueError: on purpose"),
        ("fine again", "ok", ""),
    ],
)
def test_a_case_that_breaks_costs_only_itself(
    case: str, status: str, why: str, broken: tuple[dict[str, Any], Path]
) -> None:
    found = broken[0]["broken"]
    assert found["status"] == "partly"
    ended, because = outcome(found, case)
    assert ended == status and because.startswith(why)


def test_what_a_case_found_before_it_broke_is_kept(broken: tuple[dict[str, Any], Path]) -> None:
    rows = {row["case"]: row for row in broken[0]["broken"]["tables"]["Cases"]}
    assert rows["hangs"] == {"case": "hangs", "before": True}
    assert rows["is killed"] == {"case": "is killed", "before": True}
    assert rows["fine again"] == {"case": "fine again", "before": True, "after": True}


def test_the_log_shows_where_a_case_hung(broken: tuple[dict[str, Any], Path]) -> None:
    log = (broken[1] / "log.txt").read_text()
    assert "broken.py" in log and "most recent call first" in log


def test_a_part_that_cannot_start_is_reported_and_the_next_runs(broken: tuple[dict[str, Any], Path]) -> None:
    parts, folder = broken
    assert parts["no_start"]["status"] == "failed"
    assert "ImportError: no such library" in parts["no_start"]["why"]
    text = (folder / "report.md").read_text()
    assert "ImportError: no such library" in text and "| hangs | hung |" in text


def test_a_part_ends_when_its_time_is_up_and_the_next_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_USEFUL_S", 1.0)
    start = time.monotonic()
    parts = play([part("endless"), part("broken")], tmp_path, budget_s=12)
    assert time.monotonic() - start < 20
    assert outcome(parts["endless"], "quick")[0] == "ok"
    assert outcome(parts["endless"], "long") == ("not run", "stopped: its time was up")
    assert outcome(parts["endless"], "after it") == ("not run", "no time was left")
    assert parts["endless"]["tables"][""] == [{"case": "quick"}, {"case": "long"}]
    assert outcome(parts["broken"], "fine")[0] == "ok"


def test_no_part_runs_where_a_vital_one_fails(tmp_path: Path) -> None:
    parts = play([replace(part("no_start"), is_vital=True), part("broken")], tmp_path, budget_s=20)
    assert parts["no_start"]["status"] == "failed"
    assert parts["broken"]["status"] == "not run" and parts["broken"]["why"] == "'Part no_start' failed"


def test_a_run_that_is_ended_leaves_its_report(tmp_path: Path) -> None:
    script = (
        "from benchmarks.gpu import command, plan\n"
        f"command.PARTS = [plan.Part(name='endless', title='', about='', share=1, module='{HERE}.endless')]\n"
        f"command.main(['--device', 'cpu', '--size', 'least', '--folder', {str(tmp_path)!r}])\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 40
    begun = '"event": "start", "case": "long"'
    while begun not in "".join(path.read_text() for path in tmp_path.glob("overlap-gpu-*/*/lines0.jsonl")):
        assert time.monotonic() < deadline, "the part did not come to its second case"
        time.sleep(0.1)
    process.terminate()
    assert process.wait(20) == 143
    (found,) = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert outcome(found, "quick")[0] == "ok"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parts", "machine,weather"], "--parts has weather: known are machine, "),
        (["--budget", "0"], "--budget is 0: "),
        (["--folder", "{file}/below"], "Not a directory"),
        (["--folder", "{nowhere}", "--page", "page.md"], "No such file"),
    ],
)
def test_an_option_that_cannot_be_is_an_error_in_a_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    places = {"file": tmp_path / "file", "nowhere": tmp_path / "nowhere"}
    with pytest.raises(SystemExit) as ended:
        command.main(["--folder", str(tmp_path), *(option.format(**places) for option in options)])
    assert ended.value.code == 2 and message in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_may_have_a_space_in_its_name() -> None:
    told = subprocess.run(
        ["make", "-n", "--no-print-directory", "gpu", "OUT=/a folder"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shlex.split(told.stdout)[-1] == "/a folder/overlap-gpu"


def test_of_a_part_that_did_not_begin_there_is_a_line_and_no_section() -> None:
    report = Report(started="now", device="cpu", size="least", budget_s=1.0)
    report.parts = [PartReport(name="late", title="Late", about="It shows that.", why="no time was left")]
    text = markdown(report)
    assert "| Late | not run | - | 0 | no time was left |" in text and "It shows that" not in text


def test_a_run_leaves_what_its_parts_found(tmp_path: Path) -> None:
    parts = play([one for one in PARTS if one.name in ("machine", "pictures")], tmp_path, budget_s=60)
    assert parts["machine"]["status"] == "ok" and parts["machine"]["data"]["facts"]["torch"]
    assert outcome(parts["pictures"], "ratios") == ("not run", "no step was timed")
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "report.md", "log.txt"}
    assert "a dry run with a CPU in the GPU's place" in (tmp_path / "report.md").read_text()


def gpu_report(folder: Path, device: str) -> Path:
    report = Report(started="now", device=device, size="full", budget_s=1.0, is_over=True)
    report.parts = [
        PartReport(name="ratios", title="Steps", status="ok", cases=[CaseReport(name="one", status="ok")],
                   tables={"": [{"variant": "a|b", "ms": 1.25}]}, files=["ratios.png"])
    ]  # fmt: skip
    (folder / "ratios.png").write_bytes(b"picture")
    report.save(folder / "report.json")
    return folder / "report.json"


def test_a_report_goes_into_its_place_in_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    for _ in range(2):
        write_page(gpu_report(tmp_path, "cuda"), page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert text.count("#### Steps") == 1 and "| a\\|b | 1.25 |" in text
    assert "](images/gpu-ratios.png)" in text
    assert (tmp_path / "images" / "gpu-ratios.png").read_bytes() == b"picture"


def test_a_dry_run_does_not_go_into_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    with pytest.raises(ValueError, match="dry run"):
        write_page(gpu_report(tmp_path, "cpu"), page)


def test_the_plan_is_one_of_parts_that_are_there() -> None:
    folder = ROOT / "benchmarks" / "gpu" / "parts"
    there = {f"benchmarks.gpu.parts.{path.stem}" for path in folder.glob("*.py")}
    assert {one.module_name for one in PARTS} == there - {"benchmarks.gpu.parts.__init__"}
