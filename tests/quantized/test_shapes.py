"""Quantized collectives of tensors that are empty, of no dimension, or not contiguous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness import run_ranks
from overlap import DQuantType, auto_quantize

GATHER_INTO = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER_TENSOR = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

MAKE: dict[str, Callable[[int], Tensor]] = {
    "empty": lambda value: torch.empty(0),
    "empty, of two dimensions": lambda value: torch.empty(0, 3),
    "empty, without columns": lambda value: torch.empty(4, 0),
    "empty half": lambda value: torch.empty(0, dtype=torch.bfloat16),
    "of no dimension": lambda value: torch.tensor(float(value)),
    "one double": lambda value: torch.full((1,), float(value), dtype=torch.float64),
    "transposed": lambda value: torch.full((6, 4), float(value)).t(),
    "every second": lambda value: torch.full((4, 12), float(value))[:, ::2],
    "channels_last": lambda value: torch.full((4, 2, 3, 3), float(value)).to(memory_format=torch.channels_last),
}


def _check(name: str, outputs: list[Tensor], values: list[float]) -> None:
    for output, value in zip(outputs, values, strict=True):
        assert torch.equal(output, torch.full_like(output, value)), f"{name}: {output} is not {value}"


def _every_collective(make: Callable[[int], Tensor], kind: DQuantType, rank: int, ranks: int) -> None:
    def quantized(collective: Any) -> Any:
        return auto_quantize(collective, kind)

    each = [float(one + 1) for one in range(ranks)]
    mine, outputs = make(rank + 1), [make(0) for _ in range(ranks)]
    quantized(dist.all_gather)(outputs, mine)
    _check("all_gather", outputs, each)
    for op, value in ((dist.ReduceOp.SUM, sum(each)), (dist.ReduceOp.MAX, max(each)), (dist.ReduceOp.AVG, 1.5)):
        reduced = make(rank + 1)
        quantized(dist.all_reduce)(reduced, op)
        _check(f"all_reduce {op}", [reduced], [value])
    scattered = make(0)
    quantized(dist.reduce_scatter)(scattered, [make(rank + 1) for _ in range(ranks)])
    _check("reduce_scatter", [scattered], [sum(each)])
    sent = [make(10 * rank + peer) for peer in range(ranks)]
    received = [make(0) for _ in range(ranks)]
    quantized(dist.all_to_all)(received, sent)
    _check("all_to_all", received, [10.0 * peer + rank for peer in range(ranks)])
    gathered = torch.full((ranks * mine.numel(),), 9.0, dtype=mine.dtype)
    quantized(GATHER_INTO)(gathered, mine)
    _check("all_gather_into_tensor", list(gathered.view(ranks, mine.numel())), each)
    whole = torch.full((ranks * mine.numel(),), float(rank + 1), dtype=mine.dtype)
    quantized(SCATTER_TENSOR)(scattered.zero_(), whole)
    _check("reduce_scatter_tensor", [scattered], [sum(each)])
    if mine.dim() and mine.size(0) % ranks == 0:
        single = make(0)
        quantized(dist.all_to_all_single)(single, make(rank + 1))
        _check("all_to_all_single", list(single.chunk(ranks)) if single.numel() else [], each if single.numel() else [])
        nothing, everything = make(7)[:0], make(rank + 1)
        sizes = [mine.size(0), 0] if rank == 0 else [0, 0]
        into = everything if rank == 0 else nothing
        quantized(dist.all_to_all_single)(into, everything if rank == 0 else nothing, sizes, sizes)
        _check("all_to_all_single of some", [into], [float(rank + 1)])


def _every_shape(rank: int, ranks: int, kind: DQuantType) -> None:
    for name, make in MAKE.items():
        try:
            _every_collective(make, kind, rank, ranks)
        except Exception as error:
            error.add_note(f"{name} as {kind}")
            raise


@pytest.mark.parametrize("kind", DQuantType, ids=str)
def test_every_collective_takes_tensors_of_every_shape(kind: DQuantType) -> None:
    run_ranks(_every_shape, 2, kind)
