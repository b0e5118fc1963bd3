"""Values that are too large or not finite."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from overlap import DQuantType, QuantizationOverflowError, auto_quantize


def _saturates(rank: int, ranks: int) -> None:
    tensor = torch.tensor([1e6, -1e6, 3.0, math.inf, math.nan] if rank == 0 else [0.0] * 5)
    with _warned_of("all_reduce", rank == 0):
        auto_quantize(dist.all_reduce, DQuantType.FP16)(tensor)
    assert tensor[:3].tolist() == [65504.0, -65504.0, 3.0]
    assert tensor[3].isinf() and tensor[4].isnan()


def _warned_of(name: str, is_expected: bool) -> contextlib.AbstractContextManager[Any]:
    if not is_expected:
        return contextlib.nullcontext()
    return pytest.warns(RuntimeWarning, match=f"{name}: values too large")


def test_finite_values_are_saturated_with_a_warning_and_others_stay() -> None:
    run_ranks(_saturates, 2)


def _warns_where_it_is_waited_for(rank: int, ranks: int) -> None:
    outputs = [torch.zeros(2) for _ in range(ranks)]
    gather = auto_quantize(dist.all_gather, DQuantType.FP16)
    work = gather(outputs, torch.tensor([float(rank), 1e5 * (rank == 0)]), async_op=True)
    with _warned_of("all_gather", rank == 0):
        work.wait()
    assert [output.tolist() for output in outputs[:2]] == [[0.0, 65504.0], [1.0, 0.0]]


def test_with_async_op_the_warning_comes_where_the_result_is_waited_for() -> None:
    run_ranks(_warns_where_it_is_waited_for, 2)


def _saturates_doubles(rank: int, ranks: int) -> None:
    with pytest.warns(RuntimeWarning):
        auto_quantize(dist.all_reduce, DQuantType.BFP16)(torch.tensor([1e300], dtype=torch.float64))


def test_a_double_is_saturated_at_the_end_of_the_range_of_fp32() -> None:
    run_ranks(_saturates_doubles, 2)


def _marks_a_chunk(rank: int, ranks: int) -> None:
    long = torch.ones(4096, dtype=torch.float64)
    long[0] = math.nan if rank == 0 else 1.0
    auto_quantize(dist.all_reduce, DQuantType.INT8)(long)
    assert not long[0].isfinite()
    assert torch.equal(long[2048:], torch.full((2048,), float(ranks), dtype=torch.float64))


def test_in_8_bits_a_value_that_is_not_finite_marks_its_chunk_and_no_other() -> None:
    run_ranks(_marks_a_chunk, 2)


# With overflow="raise" ---------------------------------------------------------------------------------------

TOO_LARGE: dict[str, tuple[Any, Callable[[int, int], tuple[Any, ...]]]] = {
    "gathered": (
        dist.all_gather,
        lambda rank, ranks: ([torch.zeros(1) for _ in range(ranks)], torch.tensor([1e5 * (rank == 1)])),
    ),
    "reduced": (dist.all_reduce, lambda rank, ranks: (torch.tensor([1e5 * (rank == 1)]),)),
    # No rank's part is too large.
    "sum": (dist.all_reduce, lambda rank, ranks: (torch.tensor([6e4]),)),
}


def _raises(rank: int, ranks: int, name: str) -> None:
    collective, arguments = TOO_LARGE[name]
    strict = auto_quantize(collective, DQuantType.FP16, overflow="raise")
    with pytest.raises(QuantizationOverflowError, match=r"larger than 65504.*overflow='saturate'"):
        strict(*arguments(rank, ranks))
    work = strict(*arguments(rank, ranks), async_op=True)
    with pytest.raises(QuantizationOverflowError):
        work.wait()
    assert not work.is_success()
    # All goes on.
    tensor = torch.tensor([1.0])
    auto_quantize(dist.all_reduce, DQuantType.FP16)(tensor)
    assert tensor.item() == ranks


@pytest.mark.parametrize("name", TOO_LARGE)
def test_overflow_is_an_error_on_every_rank_after_which_collectives_go_on(name: str) -> None:
    run_ranks(_raises, 2, name)
