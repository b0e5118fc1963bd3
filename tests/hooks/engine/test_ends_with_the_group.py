"""What a registration holds, threads and connections, goes with its model or its process group, after failures, too."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks
from harness.models import MLP, mean_squared_error
from overlap import AllReduce, CollectiveError, chain
from overlap.hooks.engine import executors
from overlap.hooks.engine.background import Completion
from overlap.hooks.engine.executors import Worker
from overlap.hooks.engine.registration import registration_of


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


def _thread_of(ddp: Any) -> threading.Thread:
    registration = registration_of(ddp)
    assert registration is not None
    (thread,) = (one for one in threading.enumerate() if one.name == f"overlap-{id(registration.runtime):x}")
    return thread


def test_a_thread_ends_when_its_process_group_has_been_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    is_there, done = [True], []
    monkeypatch.setattr(executors, "group_exists", lambda group: is_there[0])
    monkeypatch.setattr(executors, "_CHECK_INTERVAL_S", 0.02)
    group: Any = object()
    made = Worker("overlap-ends", abandon=lambda: done.append("connections closed"), group=group)
    (thread,) = (one for one in threading.enumerate() if one.name == "overlap-ends")
    made.submit(lambda: done.append("a job"))
    made.wait_until_idle()
    time.sleep(0.1)
    assert thread.is_alive() and done == ["a job"]
    is_there[0] = False
    thread.join(5)
    assert not thread.is_alive() and done == ["a job", "connections closed"]
    with pytest.raises(CollectiveError, match="process group has been destroyed"):
        made.submit(lambda: done.append("a job"))
    made.wait_until_idle()
    made.stop(lambda: done.append("the last"))
    assert done == ["a job", "connections closed"]


def _outlives_its_group(rank: int, world_size: int) -> None:
    group = dist.new_group()
    ddp = DistributedDataParallel(MLP.model(), process_group=group)
    registration = chain(AllReduce()).register(ddp)
    thread = _thread_of(ddp)
    mean_squared_error(ddp, MLP.batch(0, rank)).backward()
    dist.destroy_process_group(group)
    thread.join(5)
    assert not thread.is_alive()
    registration.report(ValueError("nobody is there to be told"))
    registration.remove()


def test_a_model_that_outlives_its_group_keeps_no_thread() -> None:
    run_ranks(_outlives_its_group, 2)


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
