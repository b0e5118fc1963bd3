"""The bytes that a machine sends to the others, of 4 machines with 8 ranks each: one of 32 ranks on PyTorch's "fake"
backend, which sends nothing."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.host_cost import IdleStreams
from harness import on_ranks, run_ranks
from overlap import (
    AllReduce,
    Cast,
    Int4,
    Int8,
    PowerSGD,
    Quantize,
    TopK,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
)
from overlap._torch.c10d import GroupChannel
from overlap._torch.device import streams_replaced
from overlap.hooks.engine import channels
from overlap.hooks.wires import feedback
from overlap.ranks import machines
from overlap.ranks.machines import Levels, own_subgroup

MACHINES, RANKS = 4, 8
PAGE = Path(__file__).parents[2] / "docs" / "wires.md"


def _zero(partition: str) -> Callable[[Any], Any]:
    def update(ddp: DistributedDataParallel) -> Any:
        options = {"overlap_with_ddp": True, "partition": partition}
        return ZeroStep(ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, **options))

    return update


CHAINS: dict[str, Callable[[Any], Any]] = {
    "AllReduce()": lambda ddp: AllReduce(),
    "Cast(torch.bfloat16)": lambda ddp: Cast(torch.bfloat16),
    "Quantize(Int8())": lambda ddp: Quantize(Int8()),
    "Quantize(Int4(), error_feedback=True)": lambda ddp: Quantize(Int4(), error_feedback=True),
    "Quantize(TopK(0.01), error_feedback=True)": lambda ddp: Quantize(TopK(0.01), error_feedback=True),
    "PowerSGD(rank=4)": lambda ddp: PowerSGD(rank=4),
    "PowerSGD(rank=4, wire=Int8())": lambda ddp: PowerSGD(rank=4, wire=Int8()),
    'ZeroStep, partition="element"': _zero("element"),
    'ZeroStep, partition="parameter"': _zero("parameter"),
}


class _Crossing(GroupChannel):
    """Counts what the ranks of a machine send to others, from the calls of one of them, since all make the same.

    In a collective a ring passes through each machine once, so a machine sends what one rank sends.
    """

    sent = 0.0

    def _ring(self, nbytes: int, times: int = 1) -> list[Any]:
        ranks = dist.get_process_group_ranks(self._group)
        if ranks[-1] // RANKS == len(ranks) - 1:  # One rank on each machine: every rank of it is in a group of its own.
            times *= RANKS
        if len({rank // RANKS for rank in ranks}) > 1:
            _Crossing.sent += times * nbytes * (len(ranks) - 1) / len(ranks)
        return []

    def all_reduce(self, tensor: Tensor, op: Any) -> list[Any]:
        return self._ring(tensor.nbytes, 2)

    def all_gather(self, output: Tensor, input: Tensor) -> list[Any]:
        output.zero_()  # Undefined values need not be a message.
        return self._ring(output.nbytes)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> list[Any]:
        return self._ring(input.nbytes)

    def each(self, name: str, tensors: Any) -> list[Any]:
        return self._ring(sum(tensor.nbytes for tensor, _ in tensors))

    def send_recv(self, sends: Any, receives: Any) -> list[Any]:
        ranks = dist.get_process_group_ranks(self._group)
        for tensor, peer in sends:
            _Crossing.sent += tensor.nbytes * RANKS * (ranks[peer] >= RANKS)
        for tensor, _ in receives:
            tensor.zero_()
        return []


def _model() -> nn.Module:
    """As many equal matrices as ranks, so that ranks have equal parts."""
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(MACHINES * RANKS)))


def _sent(made: Callable[[Any], Any]) -> float:
    """Times what an all-reduce in fp32 sends, in the second pass."""
    ddp = DistributedDataParallel(_model())
    stage = made(ddp)
    chain(stage).register(ddp)
    for _ in range(2):
        _Crossing.sent = 0.0
        ddp(torch.ones(2, 64)).sum().backward()
        if isinstance(stage, ZeroStep):
            stage.optimizer.step()
    numel = sum(parameter.numel() for parameter in ddp.parameters())
    return _Crossing.sent / (2 * 4 * numel * (MACHINES * RANKS - 1) / (MACHINES * RANKS))


def _of_32_ranks(rank: int, world_size: int) -> dict[str, tuple[float, float]]:
    """By chain, with a level for machines and without."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=MACHINES * RANKS)
    group = dist.group.WORLD
    assert group is not None
    parts = range(RANKS), range(0, MACHINES * RANKS, RANKS)
    levels = Levels(*(own_subgroup(ranks, group, timeout=timedelta(seconds=60)) for ranks in parts))
    found = {}
    with streams_replaced(IdleStreams()), mock.patch.object(channels, "GroupChannel", _Crossing):
        for name, made in CHAINS.items():
            ratios = []
            for known in (levels, None):
                with mock.patch.object(feedback, "levels_of", lambda group, device, known=known: known):
                    ratios.append(_sent(made))
            found[name] = (ratios[0], ratios[1])
    return found


def _table(found: dict[str, tuple[float, float]]) -> str:
    rows = [f"| `{name}` | {ratio:.2f} | {flat:.2f} |" for name, (ratio, flat) in found.items()]
    return "\n".join(["| chain | sent by a machine | each rank by itself |", "| --- | --- | --- |", *rows])


def test_a_machine_sends_the_bytes_that_the_page_says() -> None:
    (found,) = run_ranks(_of_32_ranks, 1)
    assert found["AllReduce()"] == (1.0, 1.0)
    assert 4 * found["Quantize(Int8())"][0] < found["Quantize(Int8())"][1]
    assert _table(found) in PAGE.read_text(), f"write in {PAGE.name}:\n{_table(found)}"


@on_ranks(2)
def test_host_names_are_compared_where_the_chain_is_registered(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(_model())
    chain(Quantize()).register(ddp)
    with mock.patch.object(machines, "Agreement", side_effect=AssertionError("ranks wait for each other in backward")):
        ddp(torch.ones(2, 64)).sum().backward()
