"""A rank whose process ends under Join is an error on the others; one that raises there is named on them."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from join_loops import joined

from harness import RankDied, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    CollectiveError,
    Join,
    OverlappedOptimizer,
    PeerError,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)

_TIMEOUT_S = 15
_HANG_TIMEOUT_S = 2


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _on_tcp_store(rank: int, world_size: int, port: int, timeout_s: float) -> None:
    timeout = datetime.timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _killed(rank: int, world_size: int, port: int, killed: int, joins: int, registered: bool, told_by: str) -> Any:
    """Rank ``killed`` ends in its fourth iteration, when rank ``joins`` has run out."""
    _on_tcp_store(rank, world_size, port, _TIMEOUT_S)
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if registered:
        optimizer = OverlappedOptimizer(optimizer)
        chain(AllReduce(), Step(optimizer)).register(ddp)
    start_s = time.monotonic()
    try:
        batches = MLP.batches(rank, steps=2 if rank == joins else 6)
        with joined([ddp, optimizer], batches, told_by) as iterated:
            for number, batch in enumerate(iterated):
                if rank == killed and number == 3:
                    os._exit(7)
                start_s = time.monotonic()
                optimizer.zero_grad()
                mean_squared_error(ddp, batch).backward()
                optimizer.step()
    except CollectiveError as error:
        return str(error), time.monotonic() - start_s
    return None


@pytest.mark.parametrize(
    ("killed", "joins", "world_size", "registered", "told_by"),
    [(1, 0, 3, False, "stream"), (0, 1, 2, False, "loader"), (2, 0, 3, True, "loader")],
)
def test_a_killed_rank_ends_the_others_before_the_timeout(
    killed: int, joins: int, world_size: int, registered: bool, told_by: str
) -> None:
    port = _free_port()
    results = run_ranks(
        _killed, world_size, port, killed, joins, registered, told_by, backend=None, return_exceptions=True,
        timeout_s=60,
    )  # fmt: skip
    assert isinstance(results.pop(killed), RankDied)
    for message, took_s in results:
        assert "no rank has reported an error" in message or "hosts it, has ended" in message, message
        assert took_s < _TIMEOUT_S - 3, f"not only when the group's timeout has passed: {took_s} s, {message}"


def test_a_rank_that_replays_learns_at_the_timeout_that_the_last_with_inputs_was_killed() -> None:
    """It waits for the store, where nothing breaks when a process ends."""
    (message, took_s), died = run_ranks(
        _killed, 2, _free_port(), 1, 0, False, "loader", backend=None, return_exceptions=True, timeout_s=60
    )
    assert isinstance(died, RankDied)
    assert "waited 15 s for the ranks that still have inputs to go on, and no rank has reported an error" in message
    assert took_s < _TIMEOUT_S + 8


def _raises(rank: int, world_size: int, told_by: str, form: str) -> Any:
    """Rank 1 raises in its third iteration; rank 2 has left by then."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer: Any
    if form == "step":
        optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))
        chain(AllReduce(), Step(optimizer)).register(ddp)
    else:
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
        chain(ZeroStep(optimizer)).register(ddp)
    start_s = time.monotonic()
    try:
        with joined([ddp, optimizer], MLP.batches(rank, steps=(6, 5, 1)[rank]), told_by) as iterated:
            for number, batch in enumerate(iterated):
                start_s = time.monotonic()
                if rank == 1 and number == 2:
                    raise ValueError("the dog ate it")
                mean_squared_error(ddp, batch).backward()
                optimizer.step()
    except Exception as error:
        return error, time.monotonic() - start_s
    return None


@pytest.mark.parametrize("form", ["step", "zero"])
@pytest.mark.parametrize("told_by", ["forwards", "lengths", "loader", "stream"])
def test_an_exception_of_the_loop_reaches_the_others_before_the_timeout(told_by: str, form: str) -> None:
    results = run_ranks(_raises, 3, told_by, form, group_timeout_s=_TIMEOUT_S, timeout_s=50)
    assert isinstance(results.pop(1)[0], ValueError)
    for error, took_s in results:
        assert isinstance(error, PeerError) and "rank 1" in str(error) and "the dog ate it" in str(error)
        assert took_s < _TIMEOUT_S / 2, took_s


def _everywhere(rank: int, world_size: int) -> None:
    """An exception on all ranks leaves the group as it was."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())

    def run() -> None:
        with Join([ddp]):
            mean_squared_error(ddp, MLP.batch(0, rank)).backward()
            raise StopIteration

    with pytest.raises(StopIteration):
        run()
    dist.all_reduce(torch.ones(1))


def test_an_exception_on_all_ranks_leaves_the_group_as_it_was() -> None:
    run_ranks(_everywhere, 2)


def _keys(rank: int, world_size: int) -> list[int]:
    store = dist.distributed_c10d._get_default_store()
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    numbers = []
    for _ in range(3):
        with Join([ddp]) as join:
            for batch in join.iterate(MLP.batches(rank, steps=12 - 10 * rank)):
                mean_squared_error(ddp, batch).backward()
        dist.barrier()
        numbers.append(store.num_keys())
        dist.barrier()
    return numbers


def _keys_on_tcp(rank: int, world_size: int, port: int) -> list[int]:
    _on_tcp_store(rank, world_size, port, _TIMEOUT_S)
    return _keys(rank, world_size)


def test_a_join_leaves_nothing_of_the_one_before_in_the_store() -> None:
    first, _ = run_ranks(_keys_on_tcp, 2, _free_port(), backend=None)
    assert first[1] == first[2], first  # In the first one DDP rebuilds its buckets, and another event is written.


def _host_hangs(rank: int, world_size: int, port: int, form: str) -> None:
    """Rank 0, which hosts the store, stops for longer than the group's timeout."""
    _on_tcp_store(rank, world_size, port, _HANG_TIMEOUT_S)
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer: Any
    if form == "step":
        optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1))
        chain(AllReduce(), Step(optimizer)).register(ddp)
    else:
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
        chain(ZeroStep(optimizer)).register(ddp)

    def step() -> None:
        mean_squared_error(ddp, MLP.batch(0, rank)).backward()
        optimizer.step()

    step()
    step()  # DDP has its last buckets from here on.
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    start_s = time.monotonic()
    try:
        with pytest.raises(CollectiveError, match="no rank has reported an error"):
            step()
        took_s = time.monotonic() - start_s
        # The next one finds a store that does not answer.
        with pytest.raises((CollectiveError, RuntimeError)):
            step()
    finally:
        os.kill(pids[0], signal.SIGCONT)
    assert took_s < _HANG_TIMEOUT_S + 6, took_s
    assert time.monotonic() - start_s < 25


@pytest.mark.parametrize("form", ["zero"])
def test_the_timeout_holds_when_the_rank_that_hosts_the_store_hangs(form: str) -> None:
    run_ranks(_host_hangs, 2, _free_port(), form, backend=None, timeout_s=60)
