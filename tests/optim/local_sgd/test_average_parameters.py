"""Averaging tensors over ranks, in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness import assert_parity, run_ranks, run_threads
from overlap import ConfigurationError
from overlap.optim.local_sgd import average_parameters
from overlap.optim.local_sgd.average import Packed, Slice, into_parts


def _mean_over(tensor: Tensor, *, wide: torch.dtype | None = None) -> Tensor:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor.contiguous())
    return (sum(part.to(wide or part.dtype) / len(gathered) for part in gathered)).to(tensor.dtype)  # type: ignore[union-attr]


def _tensors(rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rank)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "scalar": random(1)[0].clone(),
        "matrix": random(30, 7),
        "strided": random(8, 6).t(),
        "channels last": random(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "double": random(11, dtype=torch.float64),
        "half": random(9, dtype=torch.bfloat16),
        "complex": torch.complex(random(5), random(5)),
        "empty": random(0, 4),
        "integer": torch.tensor([rank, 7]),
        "large": random(1_200, 1_100),
        "large and half": random(1_500, 1_500, dtype=torch.bfloat16),
    }


def _averaged(rank: int) -> tuple[dict[str, Tensor], dict[str, int], dict[str, Tensor]]:
    """Averaged tensors, their addresses before, and their means."""
    tensors = _tensors(rank)
    storage = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    expected = {
        name: tensor.clone() if name in ("integer", "empty") else _mean_over(tensor) for name, tensor in tensors.items()
    }
    # Groups of an optimizer, one of them twice, none with a gradient.
    average_parameters([{"params": list(tensors.values())}, {"params": [tensors["matrix"]]}])
    return tensors, storage, expected


def _means(rank: int, world_size: int) -> None:
    tensors, _, expected = _averaged(rank)
    assert_parity(tensors, expected, what="means")


def test_every_floating_point_tensor_becomes_its_mean() -> None:
    run_ranks(_means, 2)


def _storage(rank: int, world_size: int) -> None:
    tensors, storage, _ = _averaged(rank)
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == storage
    assert tensors["channels last"].is_contiguous(memory_format=torch.channels_last)


def test_averaged_tensors_keep_storage_and_memory_format() -> None:
    run_ranks(_storage, 2)


def test_large_tensors_are_averaged_in_place_and_small_ones_packed() -> None:
    assert {type(part) for part in into_parts(_tensors(0).values())} == {Slice, Packed}


def _half(rank: int, world_size: int) -> None:
    tensors = _tensors(rank)
    halves = [tensors["half"], tensors["large and half"]]
    expected = [_mean_over(tensor, wide=torch.float32) for tensor in halves]
    average_parameters(iter(halves), dtype=torch.float32)
    assert_parity(halves, expected, what="bfloat16, averaged in fp32")


def test_half_precision_is_summed_in_a_wider_dtype() -> None:
    run_ranks(_half, 2)


def _group_of_one(rank: int, world_size: int) -> None:
    solo: Any = dist.new_group([0])
    matrix = _tensors(rank)["matrix"]
    average_parameters([matrix], solo)
    assert_parity(matrix, _tensors(rank)["matrix"], what="a group of one")


def test_a_rank_outside_the_group_keeps_its_parameters() -> None:
    run_ranks(_group_of_one, 2)


def _wrong(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigurationError, match="was given str"):
        average_parameters(["weight"])  # type: ignore[list-item]


def test_what_is_not_a_parameter_is_refused() -> None:
    run_threads(_wrong, 1)
