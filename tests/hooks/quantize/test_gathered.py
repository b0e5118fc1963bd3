"""Gradients gathered in 8 bits, against the arithmetic of PyTorch's quantization hooks."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as theirs

import overlap
from harness import assert_parity, run_ranks
from overlap import ConfigurationError, register
from overlap.hooks import GatherQuantized

from .given import assert_equal_on_all_ranks, given, of_ranks, reduced

SIZES = [1, 512, 2000]
HOOKS = pytest.mark.parametrize(
    ("hook", "chunk"),
    [
        (overlap.quantization_pertensor_hook, None),
        (overlap.quantization_perchannel_hook, 512),
        (GatherQuantized(100), 100),
    ],
    ids=["pertensor", "perchannel", "chunks of 100"],
)


def _as_torch_does(gradients: Sequence[torch.Tensor], chunk: int | None) -> torch.Tensor:
    """The arithmetic of PyTorch's hooks by its own functions, with all ranks' gradients at hand."""
    numel = gradients[0].numel()
    size = chunk or numel
    total = torch.zeros(-(-numel // size), size)
    for gradient in gradients:
        chunks = nn.functional.pad(gradient, (0, total.numel() - numel)).view(-1, size)
        low, high = chunks.amin(1).clamp(max=0), chunks.amax(1).clamp(min=0)
        scale = (high - low) / 255
        zero_point = (-(low / scale).round()).clamp(0, 255)
        integers = theirs._quantize_per_channel_backend(chunks, scale, zero_point)
        total += theirs._dequantize_per_channel_backend(integers, scale, zero_point)
    return total.flatten()[:numel] / len(gradients)


def _ways(hook: Any) -> list[Callable[[Any], Any]]:
    ways: list[Callable[[Any], Any]] = [functools.partial(register, stage=hook)]
    if not isinstance(hook, GatherQuantized):
        ways += [
            functools.partial(register, stage=hook, state=dist.group.WORLD),
            lambda ddp: ddp.register_comm_hook(None, hook),
            lambda ddp: ddp.register_comm_hook(dist.group.WORLD, hook),
        ]
    return ways


def _equals_torchs(rank: int, world_size: int, hook: Any, chunk: int | None) -> None:
    gradients = of_ranks(world_size, SIZES)
    for way in _ways(hook):
        way(ddp := given(SIZES, None))
        reduced(ddp, gradients[rank])
        got = reduced(ddp, gradients[rank])
        for index, result in enumerate(got):
            assert_parity(
                result,
                _as_torch_does([each[index] for each in gradients], chunk),
                what=f"{hook}, {SIZES[index]}",
                exact=False,
                atol=1e-6,
                reason="the span of values is halved here before it is divided, so that none is too large",
            )
        assert_equal_on_all_ranks(got)


@HOOKS
def test_means_equal_pytorchs_however_the_hook_is_registered(hook: Any, chunk: int | None) -> None:
    run_ranks(_equals_torchs, 2, hook, chunk)


def _not_finite(rank: int, world_size: int, hook: Any, chunk: int | None) -> None:
    ddp = given(SIZES, hook)
    for bad in (math.nan, -math.inf):
        broken = [g.clone() for g in of_ranks(world_size, SIZES)[rank]]
        broken[2][0] += bad if rank == 1 else 0.0
        got = reduced(ddp, broken)
        assert not got[2][:100].isfinite().any() and got[1].isfinite().all()
        assert bool(got[2][-100:].isfinite().all()) == (chunk is not None)


@HOOKS
def test_a_value_that_is_not_finite_marks_all_that_share_its_scale(hook: Any, chunk: int | None) -> None:
    run_ranks(_not_finite, 2, hook, chunk)


def _extremes(rank: int, world_size: int, hook: Any) -> None:
    ddp = given(SIZES, hook)
    for extreme in (0.0, 3e38, -3e38, 1e-30):
        got = reduced(ddp, [torch.full((size,), extreme) for size in SIZES])
        assert all(torch.allclose(g, torch.full_like(g, extreme), rtol=1e-5, atol=0.0) for g in got), extreme


@HOOKS
def test_the_smallest_and_the_largest_numbers_stay_in_range(hook: Any, chunk: int | None) -> None:
    run_ranks(_extremes, 2, hook)


@pytest.mark.parametrize("name", ["quantization_pertensor_hook", "quantization_perchannel_hook"])
def test_a_hook_pickles_by_name(name: str) -> None:
    hook = getattr(overlap, name)
    assert pickle.loads(pickle.dumps(hook)) is hook


def test_the_perchannel_hook_has_a_scale_for_each_512_values() -> None:
    assert repr(overlap.quantization_perchannel_hook.stage()) == "GatherQuantized(512)"


def test_a_chunk_of_no_values_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="bucket_size is 0"):
        GatherQuantized(0)


def test_ranks_compare_the_chunk() -> None:
    assert GatherQuantized(64).signature == "GatherQuantized(64)"
