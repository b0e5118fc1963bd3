"""The tools of `benchmarks/`, small: each runs, and saves what it says."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks import gpu, gpu_ranks, replicas
from benchmarks.bench import __main__ as bench
from benchmarks.bench.variants import registry
from benchmarks.race import __main__ as race
from harness import run_ranks


def test_the_benchmark_saves_a_row_for_each_variant(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saved, page = tmp_path / "out.json", tmp_path / "out.md"
    asked = ["--device", "cpu", "--model", "mlp", "--variants", "overlap-fp16", "--steps", "2", "--time-limit", "100"]
    assert bench.main([*asked, "--json", str(saved), "--markdown", str(page)]) == 0
    found = json.loads(saved.read_text())
    rows = {row["variant"]: row for row in found["rows"]}
    assert list(rows) == ["compute-only", "ddp-sgd", "overlap-fp16"]
    assert all(row["status"] == "ok" and row["median_ms"] > 0 for row in rows.values())
    assert rows["overlap-fp16"]["baseline"] == "ddp-sgd" and rows["overlap-fp16"]["ratio"] > 0
    assert 0.4 < rows["overlap-fp16"]["bytes_sent_per_step"] / rows["ddp-sgd"]["bytes_sent_per_step"] < 0.6
    assert found["settings"]["model"] == "mlp" and found["machine"]["cores"] > 0
    assert "overlap-fp16" in capfd.readouterr().out and "| **overlap-fp16** |" in page.read_text()
    assert bench.main(["--show", str(saved)]) == 0
    assert "overlap-fp16" in capfd.readouterr().out


def _steps(rank: int, world_size: int, argv: list[str]) -> None:
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
    dist.init_process_group = dist.destroy_process_group = lambda *backend, **options: None
    sys.argv = argv
    gpu_ranks.main()


def test_the_dry_run_for_a_gpu_reports_checks_and_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With ranks that are forked in the place of torchrun's, and the checks in this process."""

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        status: Any = 0
        if command[2] == "gpu":
            monkeypatch.setattr(sys, "argv", command[2:])
            with pytest.raises(SystemExit) as ended:
                runpy.run_module("gpu", run_name="__main__")
            status = ended.value.code
        else:
            launcher, argv = command[2:6], command[6:]
            assert launcher == ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            assert argv[:2] == ["-m", gpu_ranks.__name__]
            run_ranks(_steps, 2, argv[1:])
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(subprocess, "run", run)
    asked = ["--only", "sharded, deferred", "--rows", "in forward"]
    assert gpu.main(["--device", "cpu", "--budget", "200", "--folder", str(tmp_path), *asked]) == 0
    report = (tmp_path / "report.md").read_text()
    assert "| parity | 1 | 0 | 0 | 0 | 0 |" in report and "not run" not in report
    assert report.count("ZeroStep, deferred, in forward | ") == 2 and "NCCL through TCP" in report
    assert report.strip() in capfd.readouterr().out


def test_a_part_that_fails_ends_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = gpu._run

    def crash(argv: list[str], results: Path, limit_s: float) -> object:
        if results.stem == "checks":
            raise OSError("no process")
        return run(["nothing_of_that_name"], results, limit_s)

    monkeypatch.setattr(gpu, "_run", crash)
    assert gpu.main(["--device", "cpu", "--folder", str(tmp_path)]) == 1
    report = (tmp_path / "report.md").read_text()
    assert "OSError: no process" in report
    assert all(f"{part} left with status 1; its output is in {part}.log" in report for part in ("ranks", "slow"))


def test_variants_have_baselines() -> None:
    known = registry()
    assert all(one.baseline is None or one.baseline in known for one in known.values())


def test_a_race_keeps_its_curves_and_is_continued(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = "--contestants overlap-zero --seeds 1 --steps 8 --evaluate-every 4 --width 4 --batch-size 8 --target 0.01"
    asked += f" --output {tmp_path}"
    assert race.main(asked.split()) == 0
    (course,) = json.loads((tmp_path / "race.json").read_text())["courses"]
    assert [(cell["contestant"], cell["status"]) for cell in course["cells"]] == [("ddp", "ok"), ("overlap-zero", "ok")]
    assert course["cells"][0]["metric"] == course["cells"][1]["metric"]
    capfd.readouterr()
    page = tmp_path / "page.md"
    page.write_text(f"before {race.BEGIN} old {race.END} after")
    assert race.main([*asked.split(), "--show", "--into", str(page)]) == 0
    assert "overlap-zero" in capfd.readouterr().out
    assert page.read_text().startswith("before ") and page.read_text().endswith(" after")
    assert "| `overlap-zero` |" in page.read_text() and " old " not in page.read_text()


def test_bytes_and_losses_between_replicas_are_written_into_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{replicas.BEGIN} {replicas.END}")
    replicas.main(["--steps", "4", "--seeds", "0", "--only", "Cast", "--into", str(page)])
    _, _, _, plain, cast = page.read_text().split("\n| ")
    assert plain.startswith(f"{replicas.PLAIN} | 1.000 | ")
    assert cast.startswith("`Cast(torch.bfloat16)` | 0.50")


@pytest.mark.parametrize(
    ("main", "argv", "said"),
    [
        (bench.main, "--variants nothing", "variants has nothing; known are"),
        (bench.main, "--bandwidth fast", "bandwidth='fast' is not a speed"),
        (race.main, "--contestants nobody", "contestants has nobody; known are"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    main: object, argv: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(argv.split())  # type: ignore[operator]
    assert said in capsys.readouterr().err
