"""Which variants are timed together, and what becomes of one that fails while it is timed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from overlap.bench import rank
from overlap.bench.measurements import Measurements
from overlap.bench.settings import RunConfig, Settings
from overlap.bench.timing import timing_groups


def groups(sizes: dict[str, int], limit_bytes: int) -> list[tuple[str, ...]]:
    return timing_groups(sizes, limit_bytes, Settings())


def test_all_variants_are_timed_together_where_memory_allows() -> None:
    sizes = dict.fromkeys(("compute-only", "ddp-sgd", "ddp-adamw-fused", "torch-fp16"), 10)
    (names,) = groups(sizes, 100)
    assert set(names) == set(sizes)


def test_where_memory_is_short_several_groups_have_their_baselines_each() -> None:
    sizes = dict.fromkeys(("compute-only", "ddp-sgd", "ddp-adamw-fused", "torch-fp16", "overlap-fp16"), 10)
    several = groups(sizes, 50)
    assert len(several) > 1
    for names in several:
        assert {"compute-only", "ddp-sgd"} <= set(names) and len(names) <= 4
        assert "torch-fp16" in names or "overlap-fp16" not in names, "what its ratio to 16 bits is taken to"
    assert set().union(*several) == set(sizes)


def test_what_may_crash_is_timed_first_and_by_itself() -> None:
    sizes = dict.fromkeys(("compute-only", "ddp-sgd", "torch-powersgd-r4", "torch-fp16"), 10)
    assert groups(sizes, 100) == [
        ("compute-only", "ddp-sgd", "torch-fp16", "torch-powersgd-r4"),
        ("compute-only", "ddp-sgd", "torch-fp16"),
    ]


def test_a_baseline_whose_trial_failed_is_not_timed() -> None:
    assert groups({"compute-only": 1, "torch-fp16": 1}, 100) == [("compute-only", "torch-fp16")]


# A variant that fails while it is timed ----------------------------------------------------------------------


class Timed:
    """A rank whose children run nothing: `torch-join` takes the process down, the others have two samples."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = RunConfig(settings=Settings(), variants=(), folder=str(folder), link="loopback", deadline=0.0)
        self.supervisor = rank._Supervisor(config, 0)
        self.measurements = Measurements()
        self.tried: list[tuple[str, ...]] = []
        monkeypatch.setattr(self.supervisor, "_on_every_rank", self._run)
        monkeypatch.setattr(rank.FileExchange, "exchange", lambda self, name, value, timeout_s: [value])

    def _run(self, label: str, job: Any, limit_s: float) -> Any:
        *_, names, _until = job.args
        self.tried.append(names)
        if "torch-join" in names:
            return [], rank._Failure("crashes: SIGSEGV: no message", "torch-join")
        return [{name: [1.0, 4.0] for name in names}, {name: [3.0, 2.0] for name in names}], None

    def time(self, *names: str) -> None:
        self.supervisor._time(self.measurements, names, share=1.0)


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Timed:
    return Timed(tmp_path, monkeypatch)


def test_what_ends_the_process_is_left_out_of_the_next_try(timed: Timed) -> None:
    timed.time("ddp-sgd", "torch-join")
    assert timed.tried == [("ddp-sgd", "torch-join"), ("ddp-sgd",)]
    assert timed.measurements.failures == {"torch-join": "crashes: SIGSEGV: no message (while timed)"}


def test_a_sample_is_the_time_of_its_slowest_rank(timed: Timed) -> None:
    timed.time("ddp-sgd")
    assert timed.measurements.timings == [{"ddp-sgd": [3.0, 4.0]}]


def test_what_is_timed_alone_is_not_timed_when_time_is_up(timed: Timed) -> None:
    timed.time("compute-only", "ddp-sgd", "torch-powersgd-r4")
    assert timed.measurements.failures == {"torch-powersgd-r4": "not timed: the time limit came first"}
    assert timed.tried == [] and timed.measurements.timings == []
