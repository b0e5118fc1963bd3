"""What a registration holds, threads and connections, goes with its model or its process group, after failures, too."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks
from overlap import AllReduce, CollectiveError, chain
from overlap.hooks.engine.background import Completion


class _Model:
    pass


def test_a_failure_that_is_kept_does_not_keep_those_who_have_waited_for_it() -> None:
    completion = Completion(torch.device("cpu"))
    failure = CollectiveError("a connection is broken")
    failure.add_note("raised in part 0")
    completion.fail(failure)
    gone: list[weakref.ref[_Model]] = []

    def train() -> None:
        model = _Model()
        gone.append(weakref.ref(model))
        completion.wait()

    for _ in range(2):
        with pytest.raises(CollectiveError, match="a connection is broken") as raised:
            train()
        raised.value.add_note("raised in step 7")
        assert raised.value.__notes__ == ["raised in part 0", "raised in step 7"]
        del raised
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


class _Normalized(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


def _loses_a_connection_in_forward(rank: int, world_size: int) -> None:
    group = dist.new_group()
    ddp = DistributedDataParallel(_Normalized(), process_group=group)
    chain(AllReduce()).register(ddp)
    if rank == 0:  # DDP sends its buffers.
        del ddp
        gc.collect()
        dist.destroy_process_group(group)
        return
    with pytest.raises(RuntimeError, match="gloo") as raised:
        ddp(torch.ones(3, 4))
    assert any("no rank has reported an error" in note for note in raised.value.__notes__)


def test_a_connection_that_is_lost_in_ddps_own_collectives_gets_a_note() -> None:
    run_ranks(_loses_a_connection_in_forward, 2)
