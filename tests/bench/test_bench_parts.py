"""The pieces of the benchmark that need no run: floors, rows, the picture, the choice of variants."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from overlap.bench import rank
from overlap.bench.floor import StepProfile, floor_ms
from overlap.bench.plot import save_plot
from overlap.bench.race import plan_races
from overlap.bench.rank import Findings
from overlap.bench.registry import choose, registry, with_baselines
from overlap.bench.report import print_report
from overlap.bench.results import Report, Row, make_report, quartiles
from overlap.bench.settings import Plan, Settings, SettingsError
from overlap.cli import main

_PROFILE = StepProfile(compute_ms=100.0, ready_ms=(60.0, 70.0, 100.0), bucket_bytes=(1, 2, 1), update_ms={"sgd": 8.0})


def floor(kind: Any, sent_bytes: float) -> float:
    return floor_ms(kind, _PROFILE, optimizer="sgd", sent_bytes=sent_bytes, bandwidth_bytes_per_s=1000.0)


def test_a_quick_link_leaves_only_the_last_bucket_and_its_update() -> None:
    # 4 ms in all: each bucket is through before the next is ready, and the last takes 1 ms and its quarter of 8.
    assert floor("bucketed", 4.0) == pytest.approx(100 + 1 + 2)


def test_a_slow_link_is_busy_from_the_first_bucket_on() -> None:
    assert floor("bucketed", 400.0) == pytest.approx(60 + 400 + 2)


def test_a_bucket_waits_for_the_one_before_it() -> None:
    # 10, 20 and 10 ms: ready at 60, 70, 100, through at 70, 90, 110.
    assert floor("bucketed", 40.0) == pytest.approx(110 + 2)


def test_what_may_ride_anywhere_is_bound_by_the_longer() -> None:
    assert floor("streamed", 40.0) == pytest.approx(108)
    assert floor("streamed", 400.0) == pytest.approx(400)
    assert floor("compute", 400.0) == 100


def test_a_profile_scales_with_the_machine() -> None:
    scaled = _PROFILE.scaled_to(50.0)
    assert (scaled.ready_ms, scaled.update_ms) == ((30.0, 35.0, 50.0), {"sgd": 4.0})


def test_a_profile_without_buckets_is_refused() -> None:
    with pytest.raises(ValueError, match="ready_ms has 0 entries and bucket_bytes 1"):
        StepProfile(compute_ms=1.0, ready_ms=(), bucket_bytes=(1,), update_ms={})


def test_quartiles() -> None:
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)


# Which variants, and in how many races ----------------------------------------------------------------------


def test_every_variant_that_was_promised_is_there() -> None:
    promised = {
        "compute-only", "ddp-sgd", "ddp-adamw", "ddp-adamw-fused", "torch-hook-then-optimizer-adamw",
        "overlap-step-adamw", "torch-zero-sgd", "torch-zero-adamw", "torch-fp16", "overlap-fp16", "torch-bf16",
        "overlap-bf16", "torch-powersgd-r4", "torch-join", "torch-averager", "torch-quantize8",
        "overlap-join", "overlap-join-unknown",
    }  # fmt: skip
    assert promised <= set(registry())


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-fused", "adamw", "adamw-fused"])
def test_every_baseline_is_a_variant(optimizer: str) -> None:
    settings = Settings(optimizer=optimizer)
    for variant in registry().values():
        baseline = registry()[variant.baseline_name(settings)]
        assert baseline.baseline_name(settings) == baseline.name


def test_what_runs_on_nccl_alone_is_left_out_on_gloo() -> None:
    assert "torch-zero-interleaved-adamw" not in choose(Settings(), "gloo")
    assert "torch-zero-interleaved-adamw" in choose(Settings(), "nccl")
    # Unless it is asked for: then the row tells what happens.
    asked = Settings(variants=("torch-zero-interleaved-adamw",))
    assert choose(asked, "gloo") == ("compute-only", "ddp-sgd", "ddp-adamw-fused", "torch-zero-interleaved-adamw")


def test_one_race_where_memory_allows() -> None:
    sizes = dict.fromkeys(("compute-only", "ddp-sgd", "ddp-adamw-fused", "torch-fp16"), 10)
    (names,) = plan_races(sizes, 100, lambda names: with_baselines(names, Settings()))
    assert set(names) == set(sizes)


def test_several_races_each_with_their_baselines_where_it_does_not() -> None:
    sizes = dict.fromkeys(("compute-only", "ddp-sgd", "ddp-adamw-fused", "torch-fp16", "overlap-fp16"), 10)
    races = plan_races(sizes, 50, lambda names: with_baselines(names, Settings()))
    assert len(races) > 1
    for names in races:
        assert {"compute-only", "ddp-sgd"} <= set(names) and len(names) <= 3
    assert set().union(*races) == set(sizes)


def test_what_may_crash_races_first_and_by_itself() -> None:
    sizes = dict.fromkeys(("compute-only", "ddp-sgd", "torch-powersgd-r4", "torch-fp16"), 10)
    races = plan_races(sizes, 100, lambda names: with_baselines(names, Settings()), ["torch-powersgd-r4"])
    assert races == [("compute-only", "ddp-sgd", "torch-powersgd-r4"), ("compute-only", "ddp-sgd", "torch-fp16")]


def test_a_baseline_that_failed_is_not_raced() -> None:
    (names,) = plan_races({"compute-only": 1, "torch-fp16": 1}, 100, lambda names: with_baselines(names, Settings()))
    assert names == ("compute-only", "torch-fp16")


def test_what_takes_a_race_down_is_left_out_of_the_next_try(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Settings()
    plan = Plan(settings=settings, variants=(), folder=str(tmp_path), link="loopback", deadline=0.0)
    supervisor = rank._Supervisor(plan, 0)
    tried = []

    def together(label: str, job: Any, limit_s: float) -> Any:
        *_, names, _until = job.args
        tried.append(names)
        if "torch-join" in names:
            return [], rank._Failed("crashes: SIGSEGV: no message", "torch-join")
        return [{name: [1.0, 4.0] for name in names}, {name: [3.0, 2.0] for name in names}], None

    monkeypatch.setattr(supervisor, "_together", together)
    monkeypatch.setattr(rank.Meeting, "exchange", lambda self, name, value, timeout_s: [value])
    findings = Findings()
    supervisor._race(findings, ("ddp-sgd", "torch-join"), share=1.0)
    assert tried == [("ddp-sgd", "torch-join"), ("ddp-sgd",)]
    assert findings.failures == {"torch-join": "crashes: SIGSEGV: no message (while timed)"}
    # Of each step, the slowest rank.
    assert findings.races == [{"ddp-sgd": [3.0, 4.0]}]
    # One that races apart is all that its race is about, and waits for another run when there is no time.
    supervisor._race(findings, ("compute-only", "ddp-sgd", "torch-powersgd-r4"), share=1.0)
    assert findings.failures["torch-powersgd-r4"] == "not timed: the time limit came first"
    assert len(findings.races) == 1


# Rows, table and picture ------------------------------------------------------------------------------------


@pytest.fixture
def report(tmp_path: Path) -> Report:
    settings = Settings(bandwidth="1gbit")
    names = ("compute-only", "ddp-sgd", "torch-fp16", "overlap-fp16", "torch-powersgd-r4")
    plan = Plan(settings=settings, variants=names, folder=str(tmp_path), link="namespaces", deadline=0.0)
    profile = {
        "compute_ms": 50.0, "ready_ms": [30.0, 50.0], "bucket_bytes": [30, 10],
        "update_ms": dict.fromkeys(("sgd", "adamw", "adamw-fused"), 4.0),
    }  # fmt: skip
    ground = {"profile": profile, "memory_limit_bytes": 10**9, "link_bytes_per_s": 1.2e8}
    findings = Findings(
        ground=[ground, ground],
        trials={
            name: [
                {"sent_bytes_per_step": sent, "peak_memory_bytes": 2 * sent, "step_ms": 1.0},
                {"sent_bytes_per_step": sent + 10, "peak_memory_bytes": 2 * sent + 10, "step_ms": 1.0},
            ]
            for name, sent in [("compute-only", 0), ("ddp-sgd", 25_000_000), ("torch-fp16", 1), ("overlap-fp16", 1)]
        },
        failures={"torch-powersgd-r4": "crashes: SIGABRT: 8 vs 4"},
        races=[
            {"compute-only": [100.0], "ddp-sgd": [300.0, 310.0, 290.0], "torch-fp16": [150.0]},
            {"compute-only": [200.0], "ddp-sgd": [600.0], "overlap-fp16": [240.0]},
        ],
    )
    return make_report(plan, findings, {"cpu": "some CPU", "cores": 2, "torch": "2.13.0", "load": 0.1})


def test_rows_are_worked_out_within_their_own_race(report: Report) -> None:
    rows = {row.variant: row for row in report.rows}
    assert rows["ddp-sgd"] == Row(
        variant="ddp-sgd", median_ms=300.0, p25_ms=295.0, p75_ms=305.0, ratio=1.0, baseline="ddp-sgd",
        bytes_sent_per_step=25_000_010, peak_memory_bytes=50_000_010, exposed_ms=200.0,
        # Compute took twice what the profile says: the first bucket starts at 60 ms, and the link is busy for 200.
        floor_ms=pytest.approx(60 + 200 + 8 / 4, abs=0.01), status="ok",
    )  # fmt: skip
    assert rows["torch-fp16"].ratio == 0.5
    assert (rows["overlap-fp16"].ratio, rows["overlap-fp16"].exposed_ms) == (0.4, 40.0)
    assert rows["ddp-sgd"].score == pytest.approx(262 / 300, abs=0.001)
    assert rows["torch-powersgd-r4"].status == "crashes: SIGABRT: 8 vs 4"
    assert rows["torch-powersgd-r4"].score is None


def test_a_report_is_read_back_as_it_was_saved(report: Report, tmp_path: Path) -> None:
    report.save(tmp_path / "bench.json")
    assert Report.load(tmp_path / "bench.json") == Report(
        machine=report.machine, settings=report.settings, rows=tuple(report.rows)
    )


def test_the_table_shows_rows_and_failures(report: Report) -> None:
    console = Console(file=io.StringIO(), width=140)
    print_report(report, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "resnet18, batch 8, 2 ranks, links of 1gbit (0.96 Gbit/s measured)" in text
    assert "295.0 - 305.0" in text
    assert "torch-powersgd-r4: crashes: SIGABRT: 8 vs 4" in text


def test_a_saved_report_is_shown_again_also_as_markdown(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.save(tmp_path / "bench.json")
    assert main(["bench", "--show", str(tmp_path / "bench.json"), "--markdown", str(tmp_path / "bench.md")]) == 0
    assert "295.0 - 305.0" in capsys.readouterr().out
    lines = (tmp_path / "bench.md").read_text().splitlines()
    assert "| ddp-sgd | 300.0 | 295.0 - 305.0 | 1.000 | 25.00 | 50 | 200.0 | 262.0 | 87% | ddp-sgd |" in lines
    assert any(line.startswith("| **overlap-fp16** | 240.0 |") for line in lines)
    assert any(line.startswith("| torch-powersgd-r4 | crashes: SIGABRT: 8 vs 4 |") for line in lines)
    # Every row has as many cells as the heading.
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    with pytest.raises(SystemExit):
        main(["bench", "--show", str(tmp_path / "bench.md")])
    assert "is not a report that --json saved" in capsys.readouterr().err


def test_the_picture_is_drawn(report: Report, tmp_path: Path) -> None:
    save_plot(report, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").stat().st_size > 20_000


# Settings ---------------------------------------------------------------------------------------------------


def test_a_plan_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    settings = Settings(variants=("ddp-sgd",), bandwidth="1gbit")
    plan = Plan(settings=settings, variants=("ddp-sgd",), folder=str(tmp_path), link="loopback", deadline=1.5)
    assert Plan.load(plan.save()) == plan


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "vgg"}, "model='vgg' is not one of resnet18, resnet50, transformer, mlp, mlp-batchnorm"),
        ({"ranks": 1}, "ranks=1 is too small: at least 2"),
        ({"warmup_steps": 1}, "warmup_steps=1 is too small: at least 3"),
        ({"bucket_cap_mb": 0.0}, "bucket_cap_mb=0.0"),
        ({"bandwidth": "1 parsec"}, "bandwidth='1 parsec' is not a speed"),
        ({"plot": "/nowhere/a.png"}, "plot='/nowhere/a.png' lies in a folder that does not exist"),
    ],
)
def test_bad_settings_name_field_and_value(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        Settings(**options)
