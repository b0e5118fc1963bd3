"""Connections that are abandoned end what waits on them, also where all ranks wait for each other."""

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import on_ranks
from overlap._torch.c10d import GlooChannel
from overlap.ranks.board import Board

_TIMEOUT_S = 30
_LIMIT_S = 5


def _message(channel: GlooChannel) -> list[Any]:
    """From the next rank, which sends none."""
    return channel.send_recv([], [(torch.empty(1000), (channel.rank() + 1) % channel.size())])


def _sum(channel: GlooChannel) -> list[Any]:
    """Of rows from the other ranks, which send none."""
    return channel.add_messages([], [[torch.zeros(1000)], [torch.zeros(1000)]])


def _all_reduce(channel: GlooChannel) -> list[Any]:
    """In which the last rank takes no part."""
    if channel.rank() == channel.size() - 1:
        return _message(channel)
    return channel.all_reduce(torch.empty(200_000), dist.ReduceOp.SUM)


@on_ranks(3, env={"GLOO_SOCKET_IFNAME": "lo,lo,lo"}, timeout_s=60)
def test_ranks_that_wait_for_each_other_are_woken(rank: int, world_size: int) -> None:
    for begin in (_message, _sum, _all_reduce):
        channel = Board(dist.group.WORLD, begin.__name__).connect("gloo", purpose="")
        (work,) = begin(channel)
        failed = threading.Event()

        def wait(work: Any = work, failed: threading.Event = failed) -> None:
            with pytest.raises(RuntimeError):
                work.wait(timedelta(seconds=_TIMEOUT_S))
            failed.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        dist.barrier()
        time.sleep(0.2 * rank)
        begun_s = time.monotonic()
        channel.abort()
        assert failed.wait(_LIMIT_S)
        assert time.monotonic() - begun_s < _LIMIT_S, "it waited for the group's timeout"
        waiting.join()
        dist.barrier()
