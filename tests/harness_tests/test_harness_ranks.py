"""Ranks as processes: what they start with, and how their failures are told."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness import RankDied, RankFailed, RankHung, run_ranks


def _reduced(rank: int, world_size: int, factor: float) -> tuple[int, torch.Tensor]:
    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor)
    return rank, tensor * factor


def test_results_come_in_rank_order() -> None:
    results = run_ranks(_reduced, 3, 2.0)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert all(torch.equal(tensor, torch.full((3,), 12.0)) for _, tensor in results)


def _one_raises(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("boom")
    dist.barrier()


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    began_s = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 raised[\s\S]*in _one_raises[\s\S]*boom") as caught:
        run_ranks(_one_raises, 2)
    assert caught.value.rank == 1
    assert isinstance(caught.value.exception, ValueError)
    assert time.monotonic() - began_s < 5


def _one_dies(rank: int, world_size: int, sign: int | None) -> None:
    if rank == 1:
        print("last words", flush=True)
        if sign is not None:
            os.kill(os.getpid(), sign)
        os._exit(7)
    dist.barrier()


@pytest.mark.parametrize(("sign", "exitcode"), [(None, 7), (signal.SIGSEGV, -11)])
def test_a_rank_that_dies_is_named_with_its_last_words(sign: int | None, exitcode: int) -> None:
    began_s = time.monotonic()
    with pytest.raises(RankDied, match=rf"rank 1 died with exit code {exitcode}[\s\S]*last words") as caught:
        run_ranks(_one_dies, 2, sign)
    assert (caught.value.rank, caught.value.exitcode) == (1, exitcode)
    assert time.monotonic() - began_s < 5


def _pid_then_hang(rank: int, world_size: int, folder: Path) -> None:
    (folder / str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        time.sleep(60)
    dist.barrier()


def test_a_hang_shows_the_stacks_of_every_rank_and_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(RankHung) as caught:
        run_ranks(_pid_then_hang, 2, tmp_path, timeout_s=1.5)
    message = str(caught.value)
    assert "rank 0 had no result after 1.5 s" in message
    assert "rank 1 had no result after 1.5 s" in message
    assert "in barrier" in message
    assert "in _pid_then_hang" in message
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / str(rank)).read_text()), 0)


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
