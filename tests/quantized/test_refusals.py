"""What cannot be quantized is an error that names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness import run_ranks
from overlap import ConfigurationError, DQuantType, UnsupportedError, auto_quantize

GATHER_INTO = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def test_another_collective_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"barrier cannot be quantized; these can.*all_to_all_single"):
        auto_quantize(dist.barrier, DQuantType.FP16)


def test_another_type_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"qtype is 'fp16': give one of DQuantType\.FP16, DQuantType\.BFP16"):
        auto_quantize(dist.all_reduce, "fp16")  # type: ignore[arg-type]


def test_pytorchs_own_types_are_taken() -> None:
    from torch.distributed.algorithms._quantization.quantization import DQuantType as Theirs

    for kind in Theirs:
        assert auto_quantize(dist.all_reduce, kind).__name__ == "all_reduce"  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["0.5", True, torch.ones(1)], ids=repr)
def test_a_loss_that_is_not_a_number_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigurationError, match="give a number"):
        auto_quantize(dist.all_reduce, DQuantType.FP16, wrong)  # type: ignore[arg-type]


def test_a_loss_of_zero_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="quant_loss is 0"):
        auto_quantize(dist.all_reduce, DQuantType.FP16, 0.0)


def test_another_way_to_overflow_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="overflow is 'wrap'"):
        auto_quantize(dist.all_reduce, DQuantType.FP16, overflow="wrap")  # type: ignore[arg-type]


def _gather(*arguments: Any) -> Any:
    return auto_quantize(dist.all_gather, DQuantType.FP16)(*arguments)


def _all_to_all(*arguments: Any) -> Any:
    return auto_quantize(dist.all_to_all_single, DQuantType.INT8)(*arguments)


REFUSED: dict[str, Callable[[int], Any]] = {
    "tensor_list is a list of 2 tensors, one for each rank, got Tensor": lambda ranks: _gather(
        torch.ones(2), torch.ones(1)
    ),
    "tensor_list has 1 tensors": lambda ranks: _gather([torch.ones(1)], torch.ones(1)),
    "a tensor of tensor_list has 2 elements, and needs 1": lambda ranks: _gather(
        [torch.ones(2)] * ranks, torch.ones(1)
    ),
    "torch.int64 cannot be quantized": lambda ranks: _gather([torch.ones(1)] * ranks, torch.ones(1, dtype=torch.long)),
    "PRODUCT cannot be quantized": lambda ranks: auto_quantize(dist.all_reduce, DQuantType.INT8)(
        torch.ones(1), dist.ReduceOp.PRODUCT
    ),
    "cannot be split evenly": lambda ranks: _all_to_all(torch.ones(ranks + 1), torch.ones(ranks + 1)),
    "output_split_sizes are": lambda ranks: _all_to_all(torch.ones(4), torch.ones(4), [1] * ranks, [2] * ranks),
    "output_tensor is not contiguous": lambda ranks: auto_quantize(GATHER_INTO, DQuantType.INT8)(
        torch.ones(3, ranks).t(), torch.ones(3)
    ),
}


def _refuses(rank: int, ranks: int, message: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedError), match=message):
        REFUSED[message](ranks)


@pytest.mark.parametrize("message", REFUSED)
def test_an_argument_that_does_not_fit_is_named(message: str) -> None:
    run_ranks(_refuses, 2, message)


def _another_group(rank: int, ranks: int) -> None:
    alone = [dist.new_group([one]) for one in range(ranks)]
    with pytest.raises(ConfigurationError, match="this rank is not in the group"):
        auto_quantize(dist.all_reduce, DQuantType.INT8)(torch.ones(2), group=alone[1 - rank])


def test_a_group_without_this_rank_is_refused() -> None:
    run_ranks(_another_group, 2)
