"""Rows, the table, the saved report and the picture."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from overlap.bench.floor import StepProfile
from overlap.bench.measurements import Measurements, ModelProfile, Trial
from overlap.bench.plot import save_plot
from overlap.bench.report import markdown, print_report
from overlap.bench.results import Report, Row, make_report, quartiles
from overlap.bench.settings import RunConfig, Settings
from overlap.cli import main


def test_quartiles_are_the_25th_50th_and_75th_percentile() -> None:
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)


def test_one_sample_is_all_its_quartiles() -> None:
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)


@pytest.fixture
def report(tmp_path: Path) -> Report:
    settings = Settings(bandwidth="1gbit")
    names = ("compute-only", "ddp-sgd", "torch-fp16", "overlap-fp16", "torch-powersgd-r4")
    config = RunConfig(settings=settings, variants=names, folder=str(tmp_path), link="namespaces", deadline=0.0)
    step = StepProfile(
        compute_ms=50.0, ready_ms=(30.0, 50.0), bucket_bytes=(30, 10),
        update_ms=dict.fromkeys(("sgd", "adamw", "adamw-fused"), 4.0),
    )  # fmt: skip
    profile = ModelProfile(step=step, memory_limit_bytes=10**9, link_bytes_per_s=1.2e8)
    measurements = Measurements(
        profiles=[profile, profile],
        trials={
            name: [
                Trial(sent_bytes_per_step=sent, peak_memory_bytes=2 * sent),
                Trial(sent_bytes_per_step=sent + 10, peak_memory_bytes=2 * sent + 10),
            ]
            for name, sent in [("compute-only", 0), ("ddp-sgd", 25_000_000), ("torch-fp16", 1), ("overlap-fp16", 1)]
        },
        failures={"torch-powersgd-r4": "crashes: SIGABRT: 8 vs 4"},
        timings=[
            {"compute-only": [100.0], "ddp-sgd": [300.0, 310.0, 290.0], "torch-fp16": [150.0]},
            {"compute-only": [200.0], "ddp-sgd": [600.0], "overlap-fp16": [240.0]},
        ],
    )
    return make_report(config, measurements, {"cpu": "some CPU", "cores": 2, "torch": "2.13.0", "load": 0.1})


@pytest.fixture
def rows(report: Report) -> dict[str, Row]:
    return {row.variant: row for row in report.rows}


def test_a_row_holds_what_follows_from_samples_and_trials(rows: dict[str, Row]) -> None:
    assert rows["ddp-sgd"] == Row(
        variant="ddp-sgd", median_ms=300.0, p25_ms=295.0, p75_ms=305.0, ratio=1.0, ratio_to_16bit=2.0,
        baseline="ddp-sgd", bytes_sent_per_step=25_000_010, peak_memory_bytes=50_000_010, exposed_ms=200.0,
        # Compute took twice what the profile says: the first bucket starts at 60 ms, and the link is busy for 200.
        floor_ms=pytest.approx(60 + 200 + 8 / 4, abs=0.01), status="ok",
    )  # fmt: skip
    assert rows["ddp-sgd"].score == pytest.approx(262 / 300, abs=0.001)


def test_rows_are_compared_with_what_was_timed_together_with_them(rows: dict[str, Row]) -> None:
    assert rows["torch-fp16"].ratio == 0.5
    assert (rows["overlap-fp16"].ratio, rows["overlap-fp16"].exposed_ms) == (0.4, 40.0)
    assert (rows["ddp-sgd"].ratio_to_16bit, rows["torch-fp16"].ratio_to_16bit) == (2.0, 1.0)
    assert rows["overlap-fp16"].ratio_to_16bit is None, "the two were not timed together"


def test_a_variant_that_failed_is_a_row_without_numbers(rows: dict[str, Row]) -> None:
    assert rows["torch-powersgd-r4"].median_ms is None
    assert rows["torch-powersgd-r4"].status == "crashes: SIGABRT: 8 vs 4"
    assert rows["torch-powersgd-r4"].score is None


def test_a_report_is_read_back_as_it_was_saved(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path / "bench.json")
    assert Report.load(tmp_path / "bench.json") == Report(
        machine=report.machine, settings=report.settings, rows=tuple(report.rows)
    )


def test_the_table_shows_rows_and_failures(report: Report) -> None:
    console = Console(file=io.StringIO(), width=160)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "resnet18, batch 8, 2 ranks, links of 1gbit (0.96 Gbit/s measured)" in text
    assert "295.0 - 305.0" in text
    assert "torch-powersgd-r4: crashes: SIGABRT: 8 vs 4" in text


def test_a_saved_report_is_shown_again(report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report.save(tmp_path / "bench.json")
    assert main(["bench", "--show", str(tmp_path / "bench.json")]) == 0
    assert "295.0 - 305.0" in capsys.readouterr().out


def test_a_saved_report_becomes_markdown(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path / "bench.json")
    assert main(["bench", "--show", str(tmp_path / "bench.json"), "--markdown", str(tmp_path / "bench.md")]) == 0
    lines = (tmp_path / "bench.md").read_text().splitlines()
    assert "| ddp-sgd | 300.0 | 295.0 - 305.0 | 1.000 | 2.000 | 25.00 | 50 | 200.0 | 262.0 | 87% | ddp-sgd |" in lines
    assert any(line.startswith("| **overlap-fp16** | 240.0 |") for line in lines)
    assert any(line.startswith("| torch-powersgd-r4 | crashes: SIGABRT: 8 vs 4 |") for line in lines)
    # Every row has as many cells as the heading.
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_a_column_that_says_nothing_is_left_out(report: Report) -> None:
    told = replace(report, rows=[replace(row, ratio_to_16bit=None) for row in report.rows])
    lines = [line for line in markdown(told).splitlines() if line.startswith("|")]
    assert "to fp16" not in lines[0] and lines[0].startswith("| variant | ms a step | p25 - p75 | ratio | sent MB |")
    assert "| ddp-sgd | 300.0 | 295.0 - 305.0 | 1.000 | 25.00 | 50 | 200.0 | 262.0 | 87% | ddp-sgd |" in lines
    assert len({line.count("|") for line in lines}) == 1


def test_a_file_that_is_not_a_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bench.md").write_text("| variant |")
    with pytest.raises(SystemExit):
        main(["bench", "--show", str(tmp_path / "bench.md")])
    assert "is not a report that --json saved" in capsys.readouterr().err


def test_the_picture_is_drawn(report: Report, tmp_path: Path) -> None:
    save_plot(report, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 20_000
