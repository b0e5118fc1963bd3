"""Every wire at every place where it is taken, as a table in Markdown: bytes against fp32, largest error, parity.

    python -m benchmarks.wire_table [--ranks 2] [--into docs/reports/wires.md]

Bytes are counted on the sockets of a rank, and compared with what it sends of fp32 by an algorithm that uses the
bandwidth best. The error is the largest of any value, as a part of the largest value of the exact result. Ranks
compare their results bit by bit. With ``--into`` the table takes the place of what is between two comments there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import overlap
from benchmarks.measuring import socket_bytes
from benchmarks.pages import in_markdown, write_between
from benchmarks.ranks import World, open_network, run_on_ranks
from overlap import BFloat16, Float8, Float16, Int4, Int8, TopK, Wire

WIRES = [Float16(), BFloat16(), Float8(), Int8(), Int4(), TopK(0.1), TopK(0.01)]
NUMEL = 400_000
BEGIN, END = "<!-- wires x places, {ranks} ranks -->", "<!-- end, {ranks} ranks -->"


@dataclass
class Measured:
    share: float
    """Bytes sent, as a part of those of fp32."""
    error: float
    are_equal: bool
    """Whether all ranks have the same result; true where each has its own."""

    def __str__(self) -> str:
        return f"{self.share:.3f}, {self.error:.2g}{'' if self.are_equal else ', **ranks differ**'}"


Place = Callable[[int, int, Wire], Measured]
PLACES: dict[str, Place] = {}
_KEPT: list[Callable[[], Tensor]] = []


def place(name: str) -> Callable[[Place], Place]:
    """Registers a function of rank, number of ranks and wire as a column of the table."""

    def register(function: Place) -> Place:
        PLACES[name] = function
        return function

    return register


def values_of(rank: int, numel: int = NUMEL) -> Tensor:
    """What a rank has to send, the same wherever it is asked for."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def measured(run: Callable[[], Tensor], exact: Tensor, fp32_bytes: float, *, same: bool = True) -> Measured:
    """What ``run`` sends and how far its result is from ``exact``; it is run once before, to connect."""
    # What is still open is counted, so nothing is closed while something is measured.
    _KEPT.append(run)
    run()
    dist.barrier()
    before = socket_bytes()
    result = run()
    # Only when all have received is all of it sent.
    dist.barrier()
    sent = socket_bytes() - before
    error = float((result.double() - exact.double()).abs().max() / exact.abs().max())
    return Measured(sent / fp32_bytes, error, not same or _is_equal(result))


def _is_equal(result: Tensor) -> bool:
    gathered = [torch.empty_like(result) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, result)
    return all(torch.equal(result, other) for other in gathered)


def all_reduce_bytes(ranks: int) -> float:
    return 2 * 4 * NUMEL * (ranks - 1) / ranks


class Given(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


@place("reducer")
def _reducer(rank: int, ranks: int, wire: Wire) -> Measured:
    ddp = DistributedDataParallel(Given())
    overlap.register(ddp, overlap.Quantize(wire))

    def run() -> Tensor:
        ddp.zero_grad()
        ddp(values_of(rank)).backward()
        gradient: Tensor = ddp.module.weight.grad
        return gradient.clone()

    return measured(run, _mean(ranks), all_reduce_bytes(ranks))


@place("local SGD")
def _local_sgd(rank: int, ranks: int, wire: Wire) -> Measured:
    ddp = DistributedDataParallel(Given())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    local = overlap.LocalSGD(ddp, optimizer, 1, 0, wire=wire)

    def run() -> Tensor:
        before = ddp.module.weight.detach().clone()
        local.zero_grad()
        ddp(values_of(rank)).backward()
        local.step()
        change: Tensor = before - ddp.module.weight.detach()
        return change

    return measured(run, _mean(ranks), all_reduce_bytes(ranks))


def _mean(ranks: int) -> Tensor:
    return torch.stack([values_of(one) for one in range(ranks)]).mean(0)


def _measure_all(world: World) -> list[list[Measured]]:
    """By wire and place, as this rank sees them."""
    ranks = world.network.ranks
    return [[function(world.rank, ranks, wire) for function in PLACES.values()] for wire in WIRES]


def _worst(of_ranks: Sequence[Measured]) -> Measured:
    """The figures of the rank that sent most, and of the one that was farthest off."""
    return Measured(
        max(one.share for one in of_ranks),
        max(one.error for one in of_ranks),
        all(one.are_equal for one in of_ranks),
    )


def table(by_rank: Sequence[list[list[Measured]]]) -> str:
    """A row of Markdown for each wire."""
    rows = [["wire", *PLACES]]
    for wire, *of_wire in zip(WIRES, *by_rank, strict=True):
        rows.append([f"`{wire!r}`", *(str(_worst(of_ranks)) for of_ranks in zip(*of_wire, strict=True))])
    return in_markdown(rows, left=range(len(rows[0])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--into", type=Path)
    options = parser.parse_args()
    with open_network(options.ranks) as network:
        text = table(run_on_ranks(network, _measure_all))
    print(text)
    if options.into is not None:
        write_between(options.into, BEGIN.format(ranks=options.ranks), END.format(ranks=options.ranks), text)


if __name__ == "__main__":
    main()
