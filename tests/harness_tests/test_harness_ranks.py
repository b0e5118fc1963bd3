"""Ranks as processes: what they start with, and how their failures are told."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import one_dies, one_raises, one_sleeps, one_sleeps_while_others_wait, reduced

from harness import RankDied, RankFailed, RankHung, UnpicklableError, run_ranks


def test_results_come_in_rank_order() -> None:
    results = run_ranks(reduced, 3, 2.0)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(torch.equal(tensor, torch.full((3,), 12.0)) for _, tensor in results)


def test_closures_run() -> None:
    offset = 10
    assert run_ranks(lambda rank, world_size: rank + offset, 2, backend=None) == [10, 11]


def _facts(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "omp": os.environ["OMP_NUM_THREADS"],
        "given": os.environ.get("GIVEN"),
        "inherited": os.environ.get("INHERITED"),
        "has group": dist.is_initialized(),
        "has dynamo": "torch._dynamo" in sys.modules,
    }


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("INHERITED", "yes")
        (facts,) = run_ranks(_facts, 1, env={"GIVEN": "too"}, backend=None)
    return facts


def test_a_rank_has_one_thread_for_torch(facts: dict[str, Any]) -> None:
    assert (facts["threads"], facts["omp"]) == (1, "1")


def test_a_rank_has_the_environment_of_its_caller_and_what_it_is_given(facts: dict[str, Any]) -> None:
    assert (facts["inherited"], facts["given"]) == ("yes", "too")


def test_without_a_backend_a_rank_has_no_group(facts: dict[str, Any]) -> None:
    assert not facts["has group"]


def test_a_rank_starts_with_the_slow_imports_in_memory(facts: dict[str, Any]) -> None:
    assert facts["has dynamo"]


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    began_s = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 raised[\s\S]*in one_raises[\s\S]*boom") as caught:
        run_ranks(one_raises, 2, ValueError("boom"))
    assert caught.value.rank == 1
    assert isinstance(caught.value.exception, ValueError)
    assert time.monotonic() - began_s < 5


@pytest.mark.parametrize(("sign", "exitcode"), [(None, 7), (signal.SIGKILL, -9), (signal.SIGSEGV, -11)])
def test_a_rank_that_dies_is_named_with_its_last_words(sign: int | None, exitcode: int) -> None:
    began_s = time.monotonic()
    with pytest.raises(RankDied, match=rf"rank 1 died with exit code {exitcode}[\s\S]*last words") as caught:
        run_ranks(one_dies, 2, sign)
    assert (caught.value.rank, caught.value.exitcode) == (1, exitcode)
    assert time.monotonic() - began_s < 5


def _pid_then_hang(rank: int, world_size: int, folder: Path) -> None:
    (folder / str(rank)).write_text(str(os.getpid()))
    one_sleeps_while_others_wait(rank, world_size)


@pytest.fixture(scope="module")
def hang(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[int]]:
    """The message of a world that hung, and the process ids of its ranks."""
    folder = tmp_path_factory.mktemp("pids")
    with pytest.raises(RankHung) as caught:
        run_ranks(_pid_then_hang, 2, folder, timeout_s=2)
    return str(caught.value), [int((folder / str(rank)).read_text()) for rank in range(2)]


def test_a_hang_shows_the_stacks_of_every_rank(hang: tuple[str, list[int]]) -> None:
    message, _ = hang
    assert "rank 0 had no result after 2 s" in message
    assert "rank 1 had no result after 2 s" in message
    assert "in barrier" in message
    assert "in one_sleeps_while_others_wait" in message


def test_a_hang_leaves_no_process(hang: tuple[str, list[int]]) -> None:
    _, pids = hang
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_collective_gives_up_after_the_group_timeout() -> None:
    began_s = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 raised"):
        run_ranks(one_sleeps_while_others_wait, 2, group_timeout_s=1)
    assert time.monotonic() - began_s < 5


def test_an_exception_can_be_returned_with_its_traceback() -> None:
    peer, cause = run_ranks(one_raises, 2, KeyError("k"), return_exceptions=True)
    assert isinstance(peer, RuntimeError)
    assert isinstance(cause, KeyError)
    assert "in one_raises" in cause.__notes__[0]


def test_a_death_can_be_returned_with_its_exit_code() -> None:
    peer, death = run_ranks(one_dies, 2, None, return_exceptions=True)
    assert isinstance(peer, RuntimeError)
    assert isinstance(death, RankDied)
    assert death.exitcode == 7


def test_a_hang_can_be_returned_beside_the_others_results() -> None:
    result, hung = run_ranks(one_sleeps, 2, return_exceptions=True, timeout_s=1.5)
    assert result == 0
    assert isinstance(hung, RankHung)


class _Lingering:
    """Is collected when the rank leaves, and then it takes long."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(30)


def _leaves_late(rank: int, world_size: int) -> None:
    if rank == 1:
        _Lingering()


def test_a_rank_that_does_not_leave_shows_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.ranks._LEAVE_S", 0.5)
    with pytest.raises(RankHung, match=r"rank 1 had a result, but did not leave its group[\s\S]*__del__") as caught:
        run_ranks(_leaves_late, 2, timeout_s=1)
    if shutil.which("gdb") is not None:
        _, shown = str(caught.value).split("--- native stacks of rank 1 ---")
        assert "nanosleep" in shown or "ptrace" in shown.lower(), "where it may not look, it says so"


class _Unpicklable(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, field: str, value: int) -> None:
        super().__init__(f"{field}={value}")


def _raises_unpicklable(rank: int, world_size: int) -> None:
    raise _Unpicklable("field", 3)


def test_an_exception_that_does_not_unpickle_is_still_told() -> None:
    with pytest.raises(RankFailed, match="_Unpicklable: field=3") as caught:
        run_ranks(_raises_unpicklable, 1, backend=None)
    assert isinstance(caught.value.exception, UnpicklableError)


def _warns(rank: int, world_size: int) -> None:
    warnings.warn("a warning", stacklevel=1)


def test_warnings_are_errors() -> None:
    with pytest.raises(RankFailed, match="UserWarning: a warning"):
        run_ranks(_warns, 1, backend=None)


def _fails_in_a_thread(rank: int, world_size: int) -> None:
    thread = threading.Thread(target=[].pop)
    thread.start()
    thread.join()


def test_an_exception_in_a_thread_fails_its_rank() -> None:
    with pytest.raises(RankFailed, match="pop from empty list"):
        run_ranks(_fails_in_a_thread, 1, backend=None)
