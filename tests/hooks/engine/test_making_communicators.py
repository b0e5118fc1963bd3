"""What PyTorch is asked for where a communicator is made, with Gloo in NCCL's place."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from harness.communicators import HostStreams
from overlap import CollectiveError
from overlap._torch.c10d import AllgatherOptions, PrefixStore, group_store
from overlap._torch.communicators import CommunicatorChannel, Communicators, communicators_replaced
from overlap._torch.device import streams_replaced

CPU = torch.device("cpu")
WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"


class _Options:
    def __init__(self) -> None:
        self.is_high_priority_stream, self.config = False, "default"


class _InPlaceOfNCCL(dist.ProcessGroupGloo):
    """Notes how it was made."""

    Options = _Options
    made: list[tuple[str | None, Any]] = []  # noqa: RUF012

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, timedelta(seconds=20))
        self.made.append((os.environ.get(WATCHDOG), options))


class _OnTheHost(Communicators):
    def can_make(self, group: dist.ProcessGroup, device: torch.device) -> bool:
        return True

    def wait(self, work: Any) -> None:
        work.wait()


def _make(rank: int, world_size: int) -> None:
    dist.ProcessGroupNCCL = _InPlaceOfNCCL
    group = dist.group.WORLD
    assert group is not None
    made = _OnTheHost().make(group, PrefixStore("ours", group_store(group)), CPU)
    ((watchdog, options),) = _InPlaceOfNCCL.made
    assert watchdog == "1" and WATCHDOG not in os.environ
    assert options.global_ranks_in_group == [0, 1] and options._timeout == timedelta(seconds=20)
    ours = torch.full((2,), rank + 1.0)
    made.allreduce([ours], dist.AllreduceOptions()).wait()
    assert ours.tolist() == [3.0, 3.0]
    all_ours = torch.empty(4)
    made._allgather_base(all_ours, ours + rank, AllgatherOptions()).wait()
    assert all_ours.tolist() == [3.0, 3.0, 4.0, 4.0]


def test_a_communicator_is_a_process_group_that_works() -> None:
    run_ranks(_make, 2)


def test_a_stream_waits_and_the_host_does_not() -> None:
    asked: list[str] = []

    class Work:
        def __getattr__(self, name: str) -> Any:
            return lambda: asked.append(name)

    Communicators().wait(Work())
    assert asked == ["block_current_stream"], "wait() blocks the host in this mode, and synchronize() warns"
    assert hasattr(dist.Work, "block_current_stream")


class _NoRoom(_OnTheHost):
    def make(self, group: dist.ProcessGroup, store: Any, device: torch.device) -> Any:
        raise torch.OutOfMemoryError("CUDA error: out of memory")


def _without_room(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    refused = pytest.raises(CollectiveError, match=r"out of memory; register\(\.\.\., own_communicators=False\)")
    with streams_replaced(HostStreams()), communicators_replaced(_NoRoom()), refused:
        CommunicatorChannel(group, "no room", CPU, lambda: None)


def test_where_there_is_no_room_for_one_the_error_says_what_to_do() -> None:
    run_ranks(_without_room, 2)
