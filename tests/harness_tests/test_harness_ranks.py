"""Ranks as processes: what they start with, and how their failures are told."""

from __future__ import annotations

import os
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
from on_ranks import one_dies, one_raises, one_sleeps_while_others_wait, reduced

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


def test_a_rank_has_its_own_environment_one_thread_and_the_slow_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INHERITED", "yes")
    assert run_ranks(_facts, 1, env={"GIVEN": "too"}, backend=None) == [
        {"threads": 1, "omp": "1", "given": "too", "inherited": "yes", "has group": False, "has dynamo": True}
    ]


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    began_s = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 raised[\s\S]*in one_raises[\s\S]*boom") as caught:
        run_ranks(one_raises, 2, ValueError("boom"))
    assert caught.value.rank == 1
    assert isinstance(caught.value.exception, ValueError)
    assert time.monotonic() - began_s < 5


@pytest.mark.parametrize(("sign", "exitcode"), [(None, 7), (signal.SIGSEGV, -11)])
def test_a_rank_that_dies_is_named_with_its_last_words(sign: int | None, exitcode: int) -> None:
    began_s = time.monotonic()
    with pytest.raises(RankDied, match=rf"rank 1 died with exit code {exitcode}[\s\S]*last words") as caught:
        run_ranks(one_dies, 2, sign)
    assert (caught.value.rank, caught.value.exitcode) == (1, exitcode)
    assert time.monotonic() - began_s < 5


def _pid_then_hang(rank: int, world_size: int, folder: Path) -> None:
    (folder / str(rank)).write_text(str(os.getpid()))
    one_sleeps_while_others_wait(rank, world_size)


def test_a_hang_shows_the_stacks_of_every_rank_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(RankHung) as caught:
        run_ranks(_pid_then_hang, 2, tmp_path, timeout_s=1.5)
    message = str(caught.value)
    assert "rank 0 had no result after 1.5 s" in message
    assert "rank 1 had no result after 1.5 s" in message
    assert "in barrier" in message
    assert "in one_sleeps_while_others_wait" in message
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)


def test_a_collective_gives_up_after_the_group_timeout() -> None:
    began_s = time.monotonic()
    with pytest.raises(RankFailed, match="rank 0 raised"):
        run_ranks(one_sleeps_while_others_wait, 2, group_timeout_s=1)
    assert time.monotonic() - began_s < 5


def _each_ends_otherwise(rank: int, world_size: int) -> int:
    if rank == 1:
        raise KeyError("k")
    if rank == 2:
        os._exit(7)
    if rank == 3:
        time.sleep(60)
    return rank


def test_failures_can_be_returned_beside_results() -> None:
    result, raised, died, hung = run_ranks(_each_ends_otherwise, 4, backend=None, return_exceptions=True, timeout_s=1.5)
    assert result == 0
    assert isinstance(raised, KeyError) and "in _each_ends_otherwise" in raised.__notes__[0]
    assert isinstance(died, RankDied) and died.exitcode == 7
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
    with pytest.raises(RankHung, match=r"rank 1 had a result, but did not leave its group[\s\S]*__del__"):
        run_ranks(_leaves_late, 2, timeout_s=1)


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
