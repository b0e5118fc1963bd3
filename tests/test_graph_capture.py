"""While a CUDA graph is being captured, what acts on the host in each step is refused; afterwards loops go on."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, on_ranks
from harness.models import MLP, mean_squared_error
from overlap import (
    AllReduce,
    Join,
    LocalSGD,
    OverlappedOptimizer,
    Step,
    UnsupportedError,
    as_hook,
    chain,
)
from overlap._torch.device import DeviceStreams, is_capturing, streams_replaced
from overlap.optim import PeriodicModelAverager, PostLocalSGDOptimizer

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class _Graphs(DeviceStreams):
    """Says that a graph is being captured while it ``captures``."""

    captures = False

    def is_capturing(self, device: torch.device | None) -> bool:
        return self.captures


Refused = Callable[[], Any]
Loop = tuple[DistributedDataParallel, Any, Refused | None]
"""A model, its optimizer, and what is refused after a backward; ``None`` for the forward."""


def _model() -> DistributedDataParallel:
    return DistributedDataParallel(MLP.model(), **MLP.ddp_options())


def _interleaved() -> Loop:
    ddp = _model()
    optimizer = OverlappedOptimizer(SGD(ddp.parameters()))
    chain(AllReduce(), Step(optimizer)).register(ddp)
    return ddp, optimizer, None


def _local() -> Loop:
    ddp = _model()
    local = LocalSGD(ddp, SGD(ddp.parameters()), period=2)
    return ddp, local, local.step


def _averager() -> Loop:
    ddp = _model()
    averager = PeriodicModelAverager(period=2, warmup_steps=1)
    optimizer = PostLocalSGDOptimizer(SGD(ddp.parameters()), averager)
    return ddp, optimizer, lambda: averager.average_parameters(ddp.parameters())


LOOPS = (_interleaved, _local, _averager)


def _goes_on(rank: int, make: Callable[[], Loop]) -> None:
    graphs = _Graphs()

    def train(*, tries: bool) -> list[list[torch.Tensor]]:
        ddp, optimizer, refused = make()
        record = []
        for step in range(5):
            batch = MLP.batch(step, rank)
            if tries and refused is None:
                _refused(graphs, lambda: ddp(*batch.inputs))  # noqa: B023
            optimizer.zero_grad()
            mean_squared_error(ddp, batch).backward()
            if tries and refused is not None:
                _refused(graphs, refused)
            optimizer.step()
            record.append([parameter.detach().clone() for parameter in ddp.parameters()])
        return record

    with streams_replaced(graphs):
        assert_parity(train(tries=True), train(tries=False), what=make.__name__)


def _refused(graphs: _Graphs, function: Callable[[], Any]) -> None:
    with mock.patch.object(graphs, "captures", True), pytest.raises(UnsupportedError, match="graph is being captured"):
        function()


def _others(rank: int) -> None:
    graphs = _Graphs()
    batch = MLP.batch(0, rank)
    with streams_replaced(graphs):
        ddp = _model()
        ddp.register_comm_hook(None, as_hook(AllReduce()))
        _refused(graphs, lambda: mean_squared_error(ddp, batch).backward())
        mean_squared_error(ddp, batch).backward()

        with Join([ddp]):
            _refused(graphs, lambda: ddp(*batch.inputs))
            mean_squared_error(ddp, batch).backward()
    dist.barrier()


@on_ranks(2)
def test_a_capture_is_refused_and_loops_go_on_behind_it(rank: int, world_size: int) -> None:
    for make in LOOPS:
        _goes_on(rank, make)
    _others(rank)


def test_a_device_that_is_not_in_use_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with PyTorch's build for CUDA on a machine without a GPU, where an answer is an error."""

    def asked() -> bool:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asked)
    assert not torch.cuda.is_initialized() and not is_capturing()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="driver"):
        is_capturing()
