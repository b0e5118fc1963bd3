"""Pictures and traces of reports, and which files they go to."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from overlap import ConfigurationError, _checks
from overlap.timeline import Report, save_reports
from overlap.timeline.layout import panel_of
from overlap.timeline.spans import length_ms
from overlap.timeline.trace import trace_events
from timeline.samples import assert_slices_nest, report

# Traces ------------------------------------------------------------------------------------------------------


@pytest.fixture
def events(tmp_path: Path) -> list[dict[str, Any]]:
    """Of a trace that was saved and read again."""
    save_reports({"plain": report(), "overlapped": report()}, tmp_path / "step.json")
    saved: list[dict[str, Any]] = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert saved == list(trace_events({"plain": report(), "overlapped": report()}))
    return saved


def test_a_trace_has_a_process_for_each_rank_of_each_report(events: list[dict[str, Any]]) -> None:
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {f"{title}, rank {rank}" for title in ("plain", "overlapped") for rank in (0, 1)}


def test_no_slices_of_a_trace_overlap_unless_one_is_inside_the_other(events: list[dict[str, Any]]) -> None:
    assert_slices_nest(events)


def test_times_of_a_trace_are_microseconds_from_the_first_step(events: list[dict[str, Any]]) -> None:
    reduces = [event for event in events if event["name"] == "all_reduce[bucket 1]"]
    assert [event["ts"] for event in reduces[:3]] == [60_000, 160_000, 260_000] and reduces[0]["dur"] == 20_000


def test_a_trace_marks_ready_buckets_among_what_is_computed(events: list[dict[str, Any]]) -> None:
    assert {event["tid"] for event in events if event["ph"] == "i"} == {0}


# Pictures ----------------------------------------------------------------------------------------------------


def test_a_picture_shows_every_rank_and_what_the_colors_mean(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_reports({"plain": report(), "overlapped": report(1)}, tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    for words in ("rank 1  communication", "plain (step 2)", "ms from the start", "waits for communication", "reduce"):
        assert f"<!-- {words}" in text, words


def test_one_step_of_a_report_can_be_chosen(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_reports({"plain": report()}, tmp_path / "step.png", step=1)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_that_was_not_recorded_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigurationError, match=r"step is 3, .*\(plain\) are: 0 to 2"):
        save_reports({"plain": report()}, tmp_path / "step.png", step=3)
    with pytest.raises(ConfigurationError, match=r"recorded.*are: none"):
        panel_of("plain", Report(title="plain DDP", ranks=((), ())), None)


def test_the_bars_of_the_compute_lane_do_not_overlap() -> None:
    bars = panel_of("plain", report(), 0).lanes[0].bars
    assert sum(bar.interval.duration_ms for bar in bars) == pytest.approx(length_ms(bar.interval for bar in bars))
    assert {bar.meaning: round(bar.interval.duration_ms) for bar in bars}["waiting"] == 5


# Files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step", "step.txt", "step.json.gz"])
def test_a_file_that_is_neither_picture_nor_trace(name: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"path is '{name}': a picture ends in .png, .svg, .pdf, a trace in .json"
    ):
        save_reports({"plain": report()}, name)


def test_without_matplotlib_a_picture_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"^matplotlib not installed: pip install 'ddp-overlap\[timeline\]'$"):
        save_reports({"plain": report()}, tmp_path / "step.png")


def test_a_trace_needs_no_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without_matplotlib(name: str, *args: Any) -> Any:
        assert not name.startswith("matplotlib")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    save_reports({"plain": report()}, tmp_path / "step.json")
