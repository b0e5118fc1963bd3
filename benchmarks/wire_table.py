"""Every wire at every place where it is taken, as a table in Markdown: bytes against fp32, largest error, parity.

    python -m benchmarks.wire_table [--ranks 2] [--into docs/wires.md]

Bytes are counted on the sockets of a rank, and compared with what it sends of fp32 by an algorithm that uses the
bandwidth best. The error is the largest of any value, as a part of the largest value of the exact result. Ranks
compare their results bit by bit. With ``--into`` the table takes the place of what is between two comments there.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import overlap
from benchmarks.measuring import socket_bytes
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


@place("ZeRO, reduce")
def _zero_reduce(rank: int, ranks: int, wire: Wire) -> Measured:
    return _sharded(rank, ranks, reduce_wire=wire)


@place("ZeRO, gather")
def _zero_gather(rank: int, ranks: int, wire: Wire) -> Measured:
    return _sharded(rank, ranks, gather_wire=wire)


def _sharded(rank: int, ranks: int, **wires: Wire) -> Measured:
    """The direction without a wire sends fp32, half of an all-reduce, which is not counted."""
    ddp = DistributedDataParallel(Given())
    zero = overlap.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=1.0, overlap_with_ddp=True)
    overlap.chain(overlap.ZeroStep(zero, **wires)).register(ddp)

    def run() -> Tensor:
        before = ddp.module.weight.detach().clone()
        ddp(values_of(rank)).backward()
        zero.step()
        step: Tensor = before - ddp.module.weight.detach()
        return step

    both = measured(run, _mean(ranks), all_reduce_bytes(ranks) / 2)
    return Measured(both.share - 1, both.error, both.are_equal)


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


@place("`all_reduce`")
def _all_reduce(rank: int, ranks: int, wire: Wire) -> Measured:
    def run() -> Tensor:
        tensor = values_of(rank)
        overlap.auto_quantize(dist.all_reduce, wire)(tensor)
        return tensor

    return measured(run, _mean(ranks) * ranks, all_reduce_bytes(ranks))


@place("`reduce_scatter`")
def _reduce_scatter(rank: int, ranks: int, wire: Wire) -> Measured:
    def run() -> Tensor:
        output = torch.empty(NUMEL // ranks)
        overlap.auto_quantize(dist.reduce_scatter, wire)(output, list(values_of(rank)[: _even(ranks)].chunk(ranks)))
        return output

    exact = (_mean(ranks) * ranks)[: _even(ranks)].chunk(ranks)[rank]
    return measured(run, exact, all_reduce_bytes(ranks) / 2, same=False)


@place("`all_gather`")
def _all_gather(rank: int, ranks: int, wire: Wire) -> Measured:
    def run() -> Tensor:
        outputs = [torch.empty(NUMEL) for _ in range(ranks)]
        overlap.auto_quantize(dist.all_gather, wire)(outputs, values_of(rank))
        return torch.cat(outputs)

    return measured(run, torch.cat([values_of(one) for one in range(ranks)]), 4 * NUMEL * (ranks - 1))


def _mean(ranks: int) -> Tensor:
    return torch.stack([values_of(one) for one in range(ranks)]).mean(0)


def _even(ranks: int) -> int:
    return NUMEL // ranks * ranks


def table(results: dict[str, dict[str, Measured]]) -> str:
    """By wire and place: rows of Markdown."""
    names = list(next(iter(results.values())))
    rows = ["| | " + " | ".join(names) + " |", "| --- " * (len(names) + 1) + "|"]
    for wire, by_place in results.items():
        rows.append(f"| `{wire}` | " + " | ".join(str(by_place[name]) for name in names) + " |")
    return "\n".join(rows)


def _run(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    results = {
        repr(wire): {name: function(rank, options.ranks, wire) for name, function in PLACES.items()} for wire in WIRES
    }
    by_rank: list[dict[str, dict[str, Measured]]] = [{}] * options.ranks
    dist.all_gather_object(by_rank, results)
    if rank == 0:
        _write(table(_worst(by_rank)), options)
    dist.barrier()
    dist.destroy_process_group()


def _worst(by_rank: list[dict[str, dict[str, Measured]]]) -> dict[str, dict[str, Measured]]:
    """What the rank measured that sent most, and that was farthest off."""
    return {
        wire: {
            name: Measured(
                max(one[wire][name].share for one in by_rank),
                max(one[wire][name].error for one in by_rank),
                all(one[wire][name].are_equal for one in by_rank),
            )
            for name in places
        }
        for wire, places in by_rank[0].items()
    }


def _write(text: str, options: argparse.Namespace) -> None:
    if options.into is None:
        print(text)
        return
    begin, end = BEGIN.format(ranks=options.ranks), END.format(ranks=options.ranks)
    page = options.into.read_text()
    before, rest = page.split(begin)
    _, after = rest.split(end)
    options.into.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--into", type=Path)
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))
    mp.spawn(_run, args=(options,), nprocs=options.ranks)


if __name__ == "__main__":
    main()
