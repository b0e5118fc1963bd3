"""A failure under Join ends the others before the timeout: of a rank that raises they learn which, and why."""

import datetime
import os
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from join_loops import FORMS, joined, make, overlapped_body

from harness import RankDied, plain_step, run_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import AllReduce, CollectiveError, PeerError, chain

_TIMEOUT_S = 15


def _killed(rank: int, world_size: int, port: int, killed: int, form: str) -> Any:
    """Rank ``killed`` ends in its fourth iteration, when the other has run out."""
    timeout = datetime.timedelta(seconds=_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = make(ddp, form, lr=0.1)
    start_s = time.monotonic()
    try:
        batches = MLP.batches(rank, steps=6 if rank == killed else 2)
        with joined([ddp, optimizer], batches, FORMS[form]) as iterated:
            for number, batch in enumerate(iterated):
                if rank == killed and number == 3:
                    os._exit(7)
                start_s = time.monotonic()
                plain_step(ddp, optimizer, batch, mean_squared_error)
    except CollectiveError as error:
        return str(error), time.monotonic() - start_s
    return None


@pytest.mark.parametrize(("killed", "form"), [(0, "plain"), (1, "interleaved")])
def test_a_killed_rank_ends_the_others_before_the_timeout(killed: int, form: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    results = run_ranks(_killed, 2, port, killed, form, backend=None, return_exceptions=True, timeout_s=60)
    assert isinstance(results.pop(killed), RankDied)
    ((message, took_s),) = results
    assert "no rank has reported an error" in message or "hosts it, has ended" in message, message
    assert took_s < _TIMEOUT_S - 3, f"not only when the group's timeout has passed: {took_s} s, {message}"


def _raises(rank: int, world_size: int) -> Any:
    """Rank 1 raises in its third iteration; rank 2 has left by then."""
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    optimizer = make(ddp, "interleaved", lr=0.1)
    start_s = time.monotonic()
    try:
        with joined([ddp, optimizer], MLP.batches(rank, steps=(6, 5, 1)[rank]), "forwards") as iterated:
            for number, batch in enumerate(iterated):
                start_s = time.monotonic()
                if rank == 1 and number == 2:
                    raise ValueError("the dog ate it")
                overlapped_body(ddp, optimizer, batch, 1.0)
    except Exception as error:
        return error, time.monotonic() - start_s
    return None


def test_an_exception_of_the_loop_reaches_the_others_before_the_timeout() -> None:
    results = run_ranks(_raises, 3, group_timeout_s=_TIMEOUT_S, timeout_s=50)
    assert isinstance(results.pop(1)[0], ValueError)
    for error, took_s in results:
        assert isinstance(error, PeerError) and "rank 1" in str(error) and "the dog ate it" in str(error)
        assert took_s < _TIMEOUT_S / 2, took_s


def _used_again(rank: int, world_size: int) -> list[torch.Tensor]:
    """Rank 1 raises while rank 0 replays: once in plain DDP, and twice with a chain, which then trains on."""

    def train(ddp: Any, fails_at: int) -> None:
        with joined([ddp], MLP.batches(rank, steps=(2, 6)[rank]), "batches") as batches:
            for number, batch in enumerate(batches):
                if rank == 1 and number == fails_at:
                    raise ValueError("the dog ate it")
                mean_squared_error(ddp, batch).backward()

    plain = wrap(MLP.model(), process_group=dist.new_group([0, 1]), **MLP.ddp_options())
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    chain(AllReduce()).register(ddp)
    for model in (plain, ddp, ddp):
        start_s = time.monotonic()
        with pytest.raises((ValueError, PeerError), match="the dog ate it"):
            train(model, 4)
        assert time.monotonic() - start_s < _TIMEOUT_S / 2
        dist.barrier()
    train(ddp, -1)
    return [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]


def test_a_rank_that_replays_looks_for_failures_and_its_model_can_be_used_again() -> None:
    first, second = run_ranks(_used_again, 2, group_timeout_s=_TIMEOUT_S)
    assert first and all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
