"""An exception that the script catches on one rank reaches ranks that wait in C++, in DDP's own forward or backward."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from join_loops import joined

from harness import run_ranks, wrap
from harness.models import BATCH_NORM, MLP, Case, mean_squared_error
from overlap import CollectiveError, Join, PeerError, TrainingLoopError
from overlap._torch.gloo import has_lost_connection

# A rank that is not woken learns of it only then.
_TIMEOUT_S = 90
# Beside other processes; alone it takes about a second.
_WITHIN_S = 30


def _wakers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "overlap-waker"]


def _raises(rank: int, world_size: int, case: Case, told_by: str, at: int, where: str, lengths: tuple[int, ...]) -> Any:
    """Rank 1 raises in its iteration ``at``, before its forward or its backward, and goes on without the others."""
    ddp = wrap(case.model(), **case.ddp_options())
    start_s = time.monotonic()
    try:
        with joined([ddp], case.batches(rank, steps=lengths[rank]), told_by) as iterated:
            (waker,) = _wakers()
            for number, batch in enumerate(iterated):
                start_s = time.monotonic()
                if (rank, number, where) == (1, at, "before forward"):
                    raise ValueError("the dog ate it")
                loss = mean_squared_error(ddp, batch)
                if (rank, number, where) == (1, at, "before backward"):
                    raise ValueError("the dog ate it")
                loss.backward()
    except Exception as error:
        took_s = time.monotonic() - start_s
        assert not waker.is_alive()
        if (rank, world_size) == (0, 2):
            with pytest.raises(RuntimeError) as raised:
                dist.all_reduce(torch.ones(1))
            assert has_lost_connection(raised.value)
            took_s = time.monotonic() - start_s
        return error, took_s
    return None


def _assert_named(results: list[Any]) -> None:
    assert isinstance(results.pop(1)[0], ValueError)
    for error, took_s in results:
        assert isinstance(error, PeerError) and "rank 1: ValueError: the dog ate it" in str(error), error
        assert took_s < _WITHIN_S, f"it waited for the group's timeout: {took_s:.1f} s"


@pytest.mark.parametrize("told_by", ["forwards", "loader", "stream"])
def test_a_rank_that_waits_in_backward_is_woken(told_by: str) -> None:
    results = run_ranks(
        _raises, 2, MLP, told_by, 2, "before backward", (4, 4), group_timeout_s=_TIMEOUT_S, timeout_s=2 * _TIMEOUT_S
    )
    _assert_named(results)


@pytest.mark.parametrize(("case", "at"), [(BATCH_NORM, 2), (MLP, 1)], ids=["buffers", "buckets that are compared"])
def test_a_rank_that_waits_in_forward_is_woken(case: Case, at: int) -> None:
    results = run_ranks(
        _raises, 2, case, "loader", at, "before forward", (4, 4), group_timeout_s=_TIMEOUT_S, timeout_s=2 * _TIMEOUT_S
    )
    _assert_named(results)


@pytest.mark.parametrize("told_by", ["lengths", "stream"])
def test_so_are_all_of_three_and_one_that_replays(told_by: str) -> None:
    results = run_ranks(
        _raises, 3, MLP, told_by, 2, "before backward", (5, 4, 1), group_timeout_s=_TIMEOUT_S, timeout_s=2 * _TIMEOUT_S
    )
    _assert_named(results)


def _loses_its_connection(rank: int, world_size: int) -> Any:
    """The collective in which rank 0 waits has failed on rank 1, which has issued as many."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    start_s = time.monotonic()
    try:
        with Join([ddp], lengths=4):
            for number, batch in enumerate(MLP.batches(rank, steps=4)):
                start_s = time.monotonic()
                loss = mean_squared_error(ddp, batch)
                if (rank, number) == (1, 2):
                    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
                    before = backend._get_sequence_number_for_group()
                    for _ in ddp.parameters():
                        backend.send([torch.ones(1)], 0, 1)
                    assert backend._get_sequence_number_for_group() > before
                    raise RuntimeError("[/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
                loss.backward()
    except Exception as error:
        return error, time.monotonic() - start_s
    return None


def test_a_rank_whose_collective_has_failed_leaves_no_other_waiting_in_it() -> None:
    results = run_ranks(_loses_its_connection, 2, group_timeout_s=_TIMEOUT_S, timeout_s=2 * _TIMEOUT_S)
    assert "Connection reset by peer" in str(results.pop(1)[0])
    ((error, took_s),) = results
    assert isinstance(error, CollectiveError) and "rank 1 stopped, too" in str(error), error
    assert took_s < _WITHIN_S, f"it waited for the group's timeout: {took_s:.1f} s"


def _stops_everywhere(rank: int, world_size: int, slow_in: str) -> None:
    """All ranks raise at the same place, rank 1 later than the other."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())

    def slow(gradient: Any = None) -> None:
        if rank == 1:
            time.sleep(3)

    def run() -> None:
        with Join([ddp]) as join:
            for number, batch in enumerate(join.iterate(MLP.batches(rank, steps=6))):
                if number < 3:
                    mean_squared_error(ddp, batch).backward()
                    continue
                with ddp.no_sync():
                    if slow_in == "backward":
                        next(ddp.parameters()).register_hook(slow)
                    mean_squared_error(ddp, batch).backward()
                if slow_in == "loop":
                    slow()
                raise TrainingLoopError("the loss is good enough")

    with pytest.raises(TrainingLoopError, match="good enough"):
        run()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size


@pytest.mark.parametrize("slow_in", ["loop", "backward"])
def test_an_exception_of_all_ranks_leaves_the_group_usable(slow_in: str) -> None:
    run_ranks(_stops_everywhere, 2, slow_in, group_timeout_s=_TIMEOUT_S)


def _is_slow(rank: int, world_size: int, told_by: str) -> None:
    ddp = wrap(BATCH_NORM.model(), **BATCH_NORM.ddp_options())
    with joined([ddp], BATCH_NORM.batches(rank, steps=4 - rank), told_by) as iterated:
        for number, batch in enumerate(iterated):
            if (rank, number) == (1, 1):
                time.sleep(4)
            mean_squared_error(ddp, batch).backward()
    assert not _wakers()
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("told_by", ["loader", "stream"])
def test_a_rank_that_is_only_slow_is_waited_for(told_by: str) -> None:
    run_ranks(_is_slow, 2, told_by, group_timeout_s=_TIMEOUT_S)
