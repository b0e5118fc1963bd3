"""`python -m overlap trace`: its files, and one line for what it cannot work with."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from timeline.samples import assert_slices_nest

from harness import run_ranks
from overlap.cli import main
from overlap.demo.settings import Settings
from overlap.trace import command


@pytest.mark.parametrize(
    ("argv", "allowed"),
    [
        ("--steps 0", "from 1 to 1000"),
        ("--ranks 65", "from 1 to 64"),
        ("--stpes 3", "--ranks, --output, --steps"),
        ("--batch-size 1000", "give --batch-size 2 to 718"),
        ("--bandwidth fast", "bandwidth='fast' is not a speed"),
        ("--output FILE", "FILE', which is not a folder"),
        ("--powersgd 4 --wire int8", "--powersgd and --wire are ways to send gradients"),
    ],
)
def test_a_bad_option_is_one_line(argv: str, allowed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "FILE").touch()
    with pytest.raises(SystemExit) as ended:
        main(["trace", *argv.replace("FILE", str(tmp_path / "FILE")).split()])
    shown = capsys.readouterr()
    assert (ended.value.code, shown.out, len(shown.err.splitlines())) == (2, "", 1)
    assert shown.err.startswith("overlap trace: ") and allowed in shown.err


def test_without_root_a_bandwidth_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit):
        main(["trace", "--bandwidth", "1gbit"])
    assert "--bandwidth is 1gbit, but cannot shape a link: " in capsys.readouterr().err


def test_the_ranks_get_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Sequence[str], int]] = []

    def record(argv: Sequence[str], ranks: int) -> int:
        started.append((argv, ranks))
        return 3

    monkeypatch.setattr(command, "run_ranks", record)
    assert main(["trace", "--ranks", "3", "--steps", "4"]) == 3
    assert started == [(["trace", "--ranks", "3", "--steps", "4"], 3)]


def _trace(rank: int, world_size: int, output: Path, port: int) -> None:
    from overlap.trace import experiment

    experiment._WARMUP_STEPS = 1
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    settings = Settings(batch_size=2, image_size=8, epochs=9, device="cpu")
    assert experiment.run_experiment(settings, steps=2, output=output) == 0


def test_two_ranks_save_a_picture_and_a_trace_of_both_ways(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_ranks(_trace, 2, tmp_path / "out", port, backend=None, timeout_s=100)
    shown = capfd.readouterr().out
    assert "plain DDP on 2 ranks" in shown and "chain(AllReduce(), Step(SGD, interleaved)) on 2 ranks" in shown
    assert (tmp_path / "out" / "step.png").read_bytes().startswith(b"\x89PNG")
    events: list[dict[str, Any]] = json.loads((tmp_path / "out" / "step.json").read_text())["traceEvents"]
    assert_slices_nest(events)
    assert {event["pid"] for event in events} == {0, 1, 2, 3}
    assert {event["name"] for event in events if event["name"].startswith("step")} == {"step 0", "step 1"}


def test_the_way_to_send_that_is_asked_for_is_the_one_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    from overlap.trace import experiment

    recorded: list[Settings] = []
    monkeypatch.setattr(command, "launched_ranks", lambda asked: 2)
    monkeypatch.setattr(experiment, "run_experiment", lambda settings, **_: recorded.append(settings) or 0)
    assert main(["trace", "--powersgd", "4"]) == 0
    assert main(["trace", "--zero", "--wire", "int4"]) == 0
    assert [(each.powersgd, each.zero, each.wire) for each in recorded] == [(4, False, None), (None, True, "int4")]
