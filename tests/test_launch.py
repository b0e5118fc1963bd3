"""One process per rank: what they are told, and that none outlives the others' end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap import launch
from overlap.launch import init_ranks, run_ranks, shared_gpu_env, under_launcher

# A rank that starts a child and notes both.
START = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
noted = pathlib.Path(__file__).parent / f"pids-{os.environ['RANK']}"
noted.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
noted.with_suffix(".new").rename(noted)
"""
WAIT = f"{START}\ntime.sleep(60)\n"
PATIENCE_S = 30.0


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], Callable[[int], Sequence[str]]]:
    """Turns source text into a prefix that runs it in the place of `overlap`, which becomes its arguments."""

    def write(source: str) -> Callable[[int], Sequence[str]]:
        script = tmp_path / "rank.py"
        script.write_text(source)
        return lambda rank: [sys.executable, str(script)]

    return write


@pytest.fixture
def told(program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments and variables of each of three ranks, given an address each."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    prefix = program(
        "import json, os, pathlib, sys\n"
        "told = {'argv': sys.argv[1:], **os.environ}\n"
        "(pathlib.Path(__file__).parent / os.environ['RANK']).write_text(json.dumps(told))\n"
    )
    assert run_ranks(["demo", "--seed", "7"], 3, prefix=prefix, env=lambda rank: {"MASTER_ADDR": f"10.0.0.{rank}"}) == 0
    return [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]


def test_a_rank_runs_the_same_command(told: list[dict[str, Any]]) -> None:
    for values in told:
        assert values["argv"] == [sys.executable, "-m", "overlap", "demo", "--seed", "7"]


def test_a_rank_is_told_its_rank_and_how_many_there_are(told: list[dict[str, Any]]) -> None:
    for rank, values in enumerate(told):
        assert (values["RANK"], values["LOCAL_RANK"]) == (str(rank), str(rank))
        assert (values["WORLD_SIZE"], values["LOCAL_WORLD_SIZE"]) == ("3", "3")


def test_variables_for_a_rank_win_over_the_others(told: list[dict[str, Any]]) -> None:
    assert [values["MASTER_ADDR"] for values in told] == ["10.0.0.0", "10.0.0.1", "10.0.0.2"]


def test_ranks_are_told_one_port(told: list[dict[str, Any]]) -> None:
    assert len({values["MASTER_PORT"] for values in told}) == 1


def test_a_rank_has_one_thread(told: list[dict[str, Any]]) -> None:
    assert [values["OMP_NUM_THREADS"] for values in told] == ["1", "1", "1"]


def test_a_number_of_threads_that_the_user_chose_stays(program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert run_ranks([], 1, prefix=program("import os; raise SystemExit(os.environ['OMP_NUM_THREADS'] != '3')")) == 0


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("raise ValueError('no such thing')", 1, "ValueError: no such thing"),
        ("print('so it goes', file=sys.stderr); sys.exit(3)", 3, "rank 1 exited with code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 died by SIGKILL"),
    ],
)
def test_a_rank_that_fails_stops_the_others(
    program, tmp_path: Path, capfd: pytest.CaptureFixture[str], end: str, code: int, said: str
) -> None:
    prefix = program(
        f"{START}\n"
        "while not all((noted.parent / f'pids-{rank}').exists() for rank in range(3)):\n"
        "    time.sleep(0.01)\n"
        "if os.environ['RANK'] == '1':\n"
        "    import signal\n"
        f"    {end}\n"
        "time.sleep(60)\n"
    )
    started = time.monotonic()
    assert run_ranks([], 3, prefix=prefix) == code
    assert time.monotonic() - started < PATIENCE_S
    shown = capfd.readouterr().err
    assert said in shown
    assert "overlap: rank 1 " in shown
    assert "rank 0" not in shown and "rank 2" not in shown
    _assert_gone(tmp_path, ranks=(0, 1, 2))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_process(program, tmp_path: Path, number: signal.Signals) -> None:
    program(WAIT)
    starter = tmp_path / "starter.py"
    starter.write_text(
        "import signal, sys\n"
        "from overlap.launch import run_ranks\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)  # Ignored where the tests run under nohup.\n"
        "sys.exit(run_ranks([], 2, prefix=lambda rank: [sys.executable, sys.argv[1]]))\n"
    )
    started = subprocess.Popen([sys.executable, starter, tmp_path / "rank.py"], stderr=subprocess.PIPE, text=True)
    _wait_for(lambda: all((tmp_path / f"pids-{rank}").exists() for rank in range(2)))
    started.send_signal(number)
    _, shown = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 128 + number
    assert shown == f"overlap: stopped by {number.name}\n"
    _assert_gone(tmp_path, ranks=(0, 1))


def test_a_rank_that_ignores_the_request_to_end_is_killed(
    program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_GRACE_S", 0.2)
    prefix = program(
        "import os, pathlib, signal, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not (pathlib.Path(__file__).parent / 'pids-0').exists(): time.sleep(0.01)\n"
        "    raise SystemExit(5)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT
    )
    assert run_ranks([], 2, prefix=prefix) == 5
    _assert_gone(tmp_path, ranks=(0,))


def test_ranks_that_take_too_long_are_named_and_their_output_shown(program, capfd: pytest.CaptureFixture[str]) -> None:
    prefix = program("import os, time\nif os.environ['RANK'] == '1': print('busy', flush=True); time.sleep(60)")
    assert run_ranks([], 2, prefix=prefix, timeout_s=1.0) == 124
    shown = capfd.readouterr().err
    assert "out of time; still running: rank 1\n" in shown
    assert "last output of rank 1:\nbusy\n" in shown


def test_a_command_that_cannot_start_stops_those_that_have(program, tmp_path: Path) -> None:
    waiting = program(WAIT)

    def prefix(rank: int) -> Sequence[str]:
        if rank == 0:
            return waiting(rank)
        _wait_for((tmp_path / "pids-0").exists)
        return [str(tmp_path / "missing")]

    with pytest.raises(FileNotFoundError):
        run_ranks([], 2, prefix=prefix)
    _assert_gone(tmp_path, ranks=(0,))


def test_no_ranks_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks is 0: give at least 1"):
        run_ranks([], 0)


def test_ranks_form_a_group(program) -> None:
    prefix = program(
        "import torch, torch.distributed as dist\n"
        "from overlap.launch import init_ranks\n"
        "with init_ranks('cpu', timeout_s=30) as world:\n"
        "    total = torch.tensor([world.rank + 1.0])\n"
        "    dist.all_reduce(total)\n"
        "    assert total.item() == 3 and world.size == 2 and world.backend == 'gloo'\n"
        "    assert world.is_main == (world.rank == 0)\n"
        "assert not dist.is_initialized()\n"
    )
    assert run_ranks([], 2, prefix=prefix, timeout_s=60) == 0


def test_a_group_outside_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not under_launcher()
    with pytest.raises(RuntimeError, match="start the ranks with run_ranks or torchrun"), init_ranks():
        pass


@pytest.mark.parametrize(
    ("device", "gpus", "chosen"),
    [
        ("auto", 0, "cpu"),
        ("auto", 1, "cpu"),
        ("auto", 2, "cuda:1"),
        ("cpu", 2, "cpu"),
        ("cuda", 2, "cuda:1"),
        ("cuda", 1, "cuda:0"),
    ],
)
def test_the_device_of_the_second_of_two_ranks(
    device: str, gpus: int, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert launch.choose_device(device, local_rank=1, local_ranks=2) == torch.device(chosen)


@pytest.mark.parametrize(
    ("device", "error", "said"),
    [("cuda", RuntimeError, "torch sees no GPU: give 'cpu'"), ("tpu", ValueError, "give 'auto', 'cpu' or 'cuda'")],
)
def test_a_device_that_is_not_there_or_not_known_is_refused(
    device: str, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(error, match=said):
        launch.choose_device(device, local_rank=0, local_ranks=2)


def _assert_gone(folder: Path, ranks: Sequence[int]) -> None:
    pids = [int(pid) for rank in ranks for pid in (folder / f"pids-{rank}").read_text().split()]
    assert len(pids) == 2 * len(ranks)
    _wait_for(lambda: not any(_runs(pid) for pid in pids))


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # Ended, and waits for a parent that may never ask.


def _wait_for(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def test_ranks_that_share_a_gpu_differ_in_their_host_alone_and_use_sockets() -> None:
    one, other = shared_gpu_env(0), shared_gpu_env(1)
    assert {name for name, value in one.items() if other[name] != value} == {"NCCL_HOSTID"}
    assert one["NCCL_NET"] == "Socket" and one["NCCL_SOCKET_IFNAME"] == "lo"
