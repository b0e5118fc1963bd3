"""Choices for GPUs, without one: priorities of streams, and the setting that ends all overlap."""

import warnings
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.host_cost import IdleStreams
from harness import on_ranks, wrap
from harness.models import MLP, mean_squared_error
from overlap import AllReduce, chain
from overlap._torch.c10d import new_group_of
from overlap._torch.device import streams_replaced

_SETTING = "CUDA_DEVICE_MAX_CONNECTIONS"


def test_groups_of_the_librarys_own_get_streams_of_high_priority_on_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = mock.Mock(return_value="the group")
    monkeypatch.setattr(dist, "new_group", asked)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    for backends, is_high in (("cpu:gloo,cuda:nccl", True), ("cpu:gloo", False)):
        new_group_of([0], "its name", backends=backends, timeout=timedelta(seconds=7))
        options = asked.call_args.kwargs["pg_options"]
        assert options == (
            SimpleNamespace(is_high_priority_stream=True, _timeout=timedelta(seconds=7)) if is_high else None
        )


class _Asked(IdleStreams):
    def __init__(self) -> None:
        super().__init__()
        self.priorities: list[int] = []

    def new_stream(self, device: torch.device, *, priority: int = 0) -> Any:
        self.priorities.append(priority)
        return self


@on_ranks(2)
def test_stages_go_before_training_and_one_queue_for_all_streams_is_warned_of(rank: int, world_size: int) -> None:
    with streams_replaced(streams := _Asked()), mock.patch.dict("os.environ", {_SETTING: "8"}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            registration = chain(AllReduce()).register(ddp := wrap(MLP.model(), **MLP.ddp_options()))
        for step in range(2):
            mean_squared_error(ddp, MLP.batch(step, rank)).backward()
        # Before training, which has 0. NCCL's high priority is the highest that there is, which is -1 or lower.
        assert streams.priorities == [-1]
        registration.remove()
        with mock.patch.dict("os.environ", {_SETTING: "1"}), pytest.warns(UserWarning, match=f"unset {_SETTING}"):
            chain(AllReduce()).register(ddp)
