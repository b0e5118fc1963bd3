"""Quantized gradients among ranks: values that are not finite, and bytes. ../wires/test_sum.py has the results."""

import gc
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.measuring import socket_bytes
from harness import assert_equal_ranks, on_ranks
from overlap import AllReduce, Int4, Int8
from overlap.hooks import Quantize

from .given import given, of_ranks, reduced

SIZES = [1, 7, 300, 1000, 4099]


@on_ranks(3)
def test_a_value_on_one_rank_that_is_not_finite_marks_its_chunk_on_all_ranks_for_one_step(
    rank: int, world_size: int
) -> None:
    own = of_ranks(world_size, SIZES)[rank]
    ddp = given(SIZES, Quantize())
    for bad in (math.nan, math.inf):
        broken = [g.clone() for g in own]
        if rank == world_size - 1:
            broken[4][0] = bad
        got = reduced(ddp, broken)
        assert_equal_ranks(got)
        assert not got[4][:100].isfinite().any() and got[4][-100:].isfinite().all() and got[3].isfinite().all()
    assert all(result.isfinite().all() for result in reduced(ddp, own)), "nothing of it is remembered"


def _bytes_of_a_step(stage: Any, sizes: Sequence[int]) -> float:
    # The connections of the model before are closed: what they have sent would be missing from the second count.
    gc.collect()
    ddp = given(sizes, stage)
    gradients = [torch.randn(size) for size in sizes]
    for _ in range(2):
        reduced(ddp, gradients)
    dist.barrier()
    before = socket_bytes()
    for _ in range(2):
        reduced(ddp, gradients)
    # Only when all have received is all of it sent.
    dist.barrier()
    return (socket_bytes() - before) / 2


@on_ranks(4)
def test_bytes_sent_are_a_constant_part_of_an_all_reduce(world_size: int) -> None:
    sizes = [200_001, 100_003, 50_000]
    all_reduce = _bytes_of_a_step(AllReduce(), sizes)
    assert all_reduce == pytest.approx(2 * 4 * sum(sizes) * (world_size - 1) / world_size, rel=0.02)
    assert _bytes_of_a_step(Quantize(Int8()), sizes) <= 0.27 * all_reduce
    assert _bytes_of_a_step(Quantize(Int4(), error_feedback=True), sizes) <= 0.15 * all_reduce
