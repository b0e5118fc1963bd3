"""Ranks as processes: what they start with, and how their failures are told."""

import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

from harness import RankDied, RankFailed, RankHung, play, run_ranks


def _one_raises(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("boom")
    dist.barrier()


def test_a_rank_that_raises_is_named_with_its_traceback() -> None:
    began_s = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 raised[\s\S]*in _one_raises[\s\S]*boom") as caught:
        run_ranks(_one_raises, 2, group_timeout_s=55)
    assert caught.value.rank == 1
    assert isinstance(caught.value.exception, ValueError)
    assert time.monotonic() - began_s < 40  # The group gives up after 55 s.


def _one_dies(rank: int, world_size: int) -> None:
    if rank == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def test_a_rank_that_dies_is_named_with_its_last_words() -> None:
    began_s = time.monotonic()
    with pytest.raises(RankDied, match=r"rank 1 died with exit code -11[\s\S]*last words") as caught:
        run_ranks(_one_dies, 2, group_timeout_s=55)
    assert (caught.value.rank, caught.value.exitcode) == (1, -11)
    assert time.monotonic() - began_s < 40  # The group gives up after 55 s.


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


def _is_careless(rank: int, world_size: int) -> None:
    if rank == 0:
        warnings.warn("a warning", stacklevel=1)
    thread = threading.Thread(target=[].pop)
    thread.start()
    thread.join()


def test_warnings_and_exceptions_in_a_thread_fail_their_rank() -> None:
    warned, in_thread = run_ranks(_is_careless, 2, backend=None, return_exceptions=True)
    assert isinstance(warned, UserWarning)
    assert "pop from empty list" in str(in_thread.__notes__)


def test_a_cell_that_fails_is_named_when_all_are_played() -> None:
    played: list[int] = []
    cells = {"one": played.append, "two": {}.__getitem__, "three": played.append}
    with pytest.raises(AssertionError, match=r"^two: Traceback[\s\S]*KeyError: 7"):
        play(cells, 7)
    assert played == [7, 7]
