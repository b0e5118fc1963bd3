"""A failure under Join ends the others before the timeout: of a rank that raises they learn which, and why."""

from __future__ import annotations

import datetime
import os
import signal
import socket
import time
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from join_loops import joined, overlapped_body

from harness import RankDied, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    CollectiveError,
    OverlappedOptimizer,
    PeerError,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap.join.participation import SKEW_TO_WARN_OF

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
    [
        (0, 1, 2, False, "loader"),
        (2, 0, 3, True, "loader"),
        (1, 0, 2, True, "stream"),  # The last with inputs.
    ],
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


def _raises(rank: int, world_size: int, told_by: str, form: str | None) -> Any:
    """Rank 1 raises in its third iteration; rank 2 has left by then."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if form == "step":
        optimizer = OverlappedOptimizer(optimizer)
        chain(AllReduce(), Step(optimizer)).register(ddp)
    elif form == "zero":
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
        chain(ZeroStep(optimizer)).register(ddp)
    start_s = time.monotonic()
    try:
        with joined([ddp, optimizer], MLP.batches(rank, steps=(6, 5, 1)[rank]), told_by) as iterated:
            for number, batch in enumerate(iterated):
                start_s = time.monotonic()
                if rank == 1 and number == 2:
                    raise ValueError("the dog ate it")
                overlapped_body(ddp, optimizer, batch, 1.0)
    except Exception as error:
        return error, time.monotonic() - start_s
    return None


@pytest.mark.parametrize(
    ("told_by", "form"),
    [("forwards", "step"), ("lengths", "zero"), ("stream", "zero"), ("forwards", None)],
)
def test_an_exception_of_the_loop_reaches_the_others_before_the_timeout(told_by: str, form: str | None) -> None:
    results = run_ranks(_raises, 3, told_by, form, group_timeout_s=_TIMEOUT_S, timeout_s=50)
    assert isinstance(results.pop(1)[0], ValueError)
    for error, took_s in results:
        assert isinstance(error, PeerError) and "rank 1" in str(error) and "the dog ate it" in str(error)
        assert took_s < _TIMEOUT_S / 2, took_s


def _replays_alone(rank: int, world_size: int) -> float:
    """Rank 0 replays plain DDP's backward, of known length, while rank 1, the last with inputs, raises."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())

    def train() -> None:
        with joined([ddp], MLP.batches(rank, steps=(1, 4)[rank]), "loader") as batches:
            for number, batch in enumerate(batches):
                if rank == 1 and number == 2:
                    raise ValueError("the dog ate it")
                mean_squared_error(ddp, batch).backward()

    start_s = time.monotonic()
    with pytest.raises((ValueError, PeerError), match="the dog ate it"):
        train()
    return time.monotonic() - start_s


def test_a_rank_that_replays_without_a_chain_looks_for_failures() -> None:
    assert max(run_ranks(_replays_alone, 2, group_timeout_s=_TIMEOUT_S)) < _TIMEOUT_S / 2


def _used_again(rank: int, world_size: int) -> list[torch.Tensor]:
    """Rank 1 raises while rank 0 replays on the connections of a chain, twice; then both train on."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(AllReduce()).register(ddp)

    def train(fails_at: int) -> None:
        with joined([ddp], MLP.batches(rank, steps=(2, 6)[rank]), "loader") as batches:
            for number, batch in enumerate(batches):
                if rank == 1 and number == fails_at:
                    raise ValueError("the dog ate it")
                mean_squared_error(ddp, batch).backward()

    for _ in range(2):
        with pytest.raises((ValueError, PeerError), match="the dog ate it"):
            train(4)
        dist.barrier()
    train(-1)
    return [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]


def test_a_model_with_a_chain_can_be_used_again_after_a_failed_block() -> None:
    first, second = run_ranks(_used_again, 2, group_timeout_s=_TIMEOUT_S)
    assert first and all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def _skewed(rank: int, world_size: int) -> list[str]:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    batches = [MLP.batch(0, rank)] * (60 if rank == 0 else 3)
    skew = mock.patch("overlap.join.participation.SKEW_TO_WARN_OF", 50)
    with skew, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with joined([ddp], batches, "loader") as iterated:
            for batch in iterated:
                mean_squared_error(ddp, batch).backward()
    return [str(each.message) for each in caught]


def test_a_rank_that_replays_long_is_warned_of_once_by_number() -> None:
    active, joined_rank = run_ranks(_skewed, 2)
    assert not active and SKEW_TO_WARN_OF == 1000
    assert len(joined_rank) == 1
    assert "rank 1 ran out after 3 iterations and has replayed 50" in joined_rank[0]


def _host_hangs(rank: int, world_size: int, port: int) -> None:
    """Rank 0, which hosts the store, stops for longer than the group's timeout."""
    _on_tcp_store(rank, world_size, port, _HANG_TIMEOUT_S)
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    ddp = wrap(MLP.model(), **MLP.ddp_options())
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


def test_the_timeout_holds_when_the_rank_that_hosts_the_store_hangs() -> None:
    run_ranks(_host_hangs, 2, _free_port(), backend=None, timeout_s=60)
