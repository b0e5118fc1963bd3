"""What is handed to NCCL begins where NCCL copies fastest, and where nothing is gained nothing is padded."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness import assert_parity, run_ranks
from overlap import (
    AllGather,
    AllReduce,
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

from .one_stream import OneStream

# Of parameters: such that neither what ranks own of them nor where they begin in a bucket is a multiple of 16 bytes.
SHAPES = [(7,), (301, 3), (37,), (35, 37), (1,), (20_003,), (65, 5)]


def _parts(name: str, size: int, first: Any, second: Any) -> list[torch.Tensor]:
    """The tensors, and the segments of them, that a collective of a channel sends."""
    if name == "send_recv":
        return [tensor for tensor, _ in (*first, *second)]
    if name == "add_messages":
        return [tensor for tensor, _ in first]
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
        for name in ("all_reduce", "all_gather", "reduce_scatter", "send_recv", "add_messages"):
            patched = noting(name, getattr(GroupChannel, name))
            stack.enter_context(mock.patch.object(GroupChannel, name, patched))
        yield found


class Parameters(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.ParameterList([torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES])

    def forward(self, scale: float) -> torch.Tensor:
        return sum((weight * weight).sum() for weight in self.w) * scale


REDUCERS: dict[str, Callable[[], Any]] = {
    "AllReduce": AllReduce,
    "AllGather": AllGather,
    "Quantize, error feedback": lambda: Quantize(Int4(), error_feedback=True),
    "PowerSGD": lambda: PowerSGD(rank=1, min_compression_rate=0),
    "PowerSGD, Float8": lambda: PowerSGD(rank=3, wire=Float8()),
    "route": lambda: route({"w.1": AllReduce(), "w.3": PowerSGD(rank=2), "*": Quantize()}),
}
UPDATES: dict[str, dict[str, Any]] = {
    "ZeroStep": {},
    "ZeroStep, gather in forward": {"gather": "forward"},
}
EXACT = {"AllReduce", "AllGather"}
PARTITIONS = ("element", "parameter")
WAYS = [
    *REDUCERS,
    *(f"{what} by {partition}" for what in UPDATES for partition in PARTITIONS),
    "LocalSGD, wire",
]


def _train(way: str, dtype: torch.dtype, *, steps: int = 2) -> list[torch.Tensor]:
    ddp = DistributedDataParallel(Parameters(dtype), bucket_cap_mb=0.05)
    scale = 0.1 * (1 + dist.get_rank())
    make = functools.partial(torch.optim.Adam, lr=0.01)
    if way in REDUCERS:
        optimizer: Any = make(ddp.parameters())
        chain(REDUCERS[way]()).register(ddp)
    elif way == "LocalSGD, wire":
        optimizer = LocalSGD(ddp, make(ddp.parameters()), period=1, start_step=0, wire=Int8())
    else:
        what, _, partition = way.partition(" by ")
        optimizer = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.Adam, lr=0.01, overlap_with_ddp=True, partition=partition
        )
        chain(ZeroStep(optimizer, **UPDATES[what])).register(ddp)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(scale).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in ddp.parameters()]


def _aligned(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    # Every other way in bfloat16.
    for way, dtype in zip(WAYS, itertools.cycle((torch.float32, torch.bfloat16)), strict=False):
        expected = _train(way, dtype)
        with streams_replaced(OneStream()), _misaligned() as misaligned:
            got = _train(way, dtype)
        assert not misaligned, f"{way}: {misaligned[:3]}"
        # Chunks of a wire begin elsewhere where parts have padding, and several matrices are multiplied by another
        # kernel.
        if way in EXACT or way.startswith("ZeroStep"):
            assert_parity(got, expected, what=f"{way}, {dtype}")
        for one, other in zip(got, expected, strict=True):
            assert (one - other).abs().float().max() <= 0.07, way


def test_where_there_are_streams_all_that_is_sent_begins_at_16_bytes() -> None:
    run_ranks(_aligned, 2, timeout_s=120)
