"""What is handed to NCCL begins where NCCL copies fastest, and where nothing is gained nothing is padded."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.host_cost import IdleStreams
from harness import assert_parity, on_ranks
from overlap import (
    AllReduce,
    Cast,
    Float8,
    Int4,
    Int8,
    LocalSGD,
    PowerSGD,
    Quantize,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
    route,
)
from overlap._torch.c10d import GroupChannel
from overlap._torch.device import streams_replaced

# Of parameters: such that neither what ranks own of them nor where they begin in a bucket is a multiple of 16 bytes.
SHAPES = [(7,), (301, 3), (37,), (35, 37), (1,), (20_003,), (65, 5)]


def _parts(name: str, size: int, first: Any, second: Any) -> list[torch.Tensor]:
    """The tensors, and the segments of them, that a collective of a channel sends."""
    if name == "send_recv":
        return [tensor for tensor, _ in (*first, *second)]
    if name == "add_messages":
        return [tensor for tensor, _ in first]
    if name == "each":
        return [tensor for tensor, _ in second]
    if name == "all_reduce":
        return [first]
    return [first, second, *(first if name == "all_gather" else second).chunk(size)]


@contextlib.contextmanager
def _misaligned() -> Iterator[list[str]]:
    """What is given to the group's channels, and does not begin at 16 bytes; at first "no collective"."""
    found = ["no collective"]

    def noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(channel: Any, *args: Any) -> Any:
            found[:] = found if found != ["no collective"] else []
            parts = _parts(name, channel.size(), *args[:2])
            found.extend(f"{name} of {part.numel()} {part.dtype}" for part in parts if part.data_ptr() % 16)
            return original(channel, *args)

        return call

    with contextlib.ExitStack() as stack:
        for name in ("all_reduce", "all_gather", "reduce_scatter", "send_recv", "add_messages", "each"):
            patched = noting(name, getattr(GroupChannel, name))
            stack.enter_context(mock.patch.object(GroupChannel, name, patched))
        yield found


class Parameters(nn.Module):
    """Of two bytes an element: the offsets of few are multiples of 16 bytes."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.ParameterList([torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES])

    def forward(self, scale: float) -> torch.Tensor:
        return sum((weight * weight).sum() for weight in self.w) * scale


REDUCERS: dict[str, Callable[[], Any]] = {
    "AllReduce": AllReduce,
    "Cast": lambda: Cast(torch.bfloat16),
    "Quantize, error feedback": lambda: Quantize(Int4(), error_feedback=True),
    "PowerSGD, Float8": lambda: PowerSGD(rank=3, wire=Float8()),
    "route": lambda: route({"w.1": AllReduce(), "w.3": PowerSGD(rank=2), "*": Quantize()}),
}
EXACT = ("AllReduce", "Cast", "ZeroStep by element", "ZeroStep by parameter")
WAYS = [*REDUCERS, "ZeroStep by element", "ZeroStep by parameter", "LocalSGD, wire"]


def _train(way: str) -> list[torch.Tensor]:
    ddp = DistributedDataParallel(Parameters(), bucket_cap_mb=0.025)
    scale = 0.1 * (1 + dist.get_rank())
    make = functools.partial(torch.optim.Adam, lr=0.01)
    if way in REDUCERS:
        optimizer: Any = make(ddp.parameters())
        chain(REDUCERS[way]()).register(ddp)
    elif way == "LocalSGD, wire":
        optimizer = LocalSGD(ddp, make(ddp.parameters()), period=1, start_step=0, wire=Int8())
    else:
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.Adam, lr=0.01, overlap_with_ddp=True, partition=way.rpartition(" ")[2]
        )
        chain(ZeroStep(optimizer)).register(ddp)
    for _ in range(2):
        optimizer.zero_grad()
        ddp(scale).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in ddp.parameters()]


@on_ranks(2, timeout_s=120)
def test_where_there_are_streams_all_that_is_sent_begins_at_16_bytes(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    for way in WAYS:
        with streams_replaced(IdleStreams()), _misaligned() as misaligned:
            got = _train(way)
        assert not misaligned, f"{way}: {misaligned[:3]}"
        if way in EXACT:
            assert_parity(got, _train(way), what=way)
