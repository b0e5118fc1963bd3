"""Sums that tell whether values have changed, of one tensor and of many at once."""

from __future__ import annotations

import pytest
import torch

from overlap.optim.fingerprint import _segments, fingerprint, fingerprints

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.complex64]


def _tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes: list[tuple[int, ...]] = [(1,), (), (3, 5), (0,), (2, 3, 4, 5), (2048,), (2049,), (9000,), (7, 11)]
    made = [(100 * torch.rand(shape, generator=generator)).to(dtype) for shape in shapes]
    made[4] = made[4].contiguous(memory_format=torch.channels_last)
    made[8] = made[8].t()
    base = torch.rand(40, generator=generator).to(dtype)
    return [*made, base[3:17], base[17:20]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_at_once_have_the_same_sums_as_each_alone(dtype: torch.dtype) -> None:
    tensors = _tensors(dtype)
    assert [int(value) for value in fingerprints(tensors)] == [int(fingerprint(tensor)) for tensor in tensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_change_of_one_is_seen_in_its_own_sum_alone(dtype: torch.dtype) -> None:
    tensors = _tensors(dtype)
    before = [int(value) for value in fingerprints(tensors)]
    tensors[2].view(-1)[7] += 1
    after = [int(value) for value in fingerprints(tensors)]
    assert [place for place, value in enumerate(before) if value != after[place]] == [2]


def test_of_no_tensors_there_are_none() -> None:
    assert fingerprints([]) == []


def test_sets_that_are_always_others_are_not_kept() -> None:
    # 32 KB of weights each; a model of which each pass uses other layers has no end of sets.
    _segments.cache_clear()
    for place in range(64):
        fingerprints([torch.zeros(2048), torch.zeros(2048), torch.zeros(1 + place)])
    assert _segments.cache_info().currsize <= 8
