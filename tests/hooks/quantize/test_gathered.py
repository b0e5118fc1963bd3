"""Gradients gathered in 8 bits, against the arithmetic of PyTorch's quantization hooks."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as theirs

import overlap
from harness import assert_equal_ranks, assert_parity, on_ranks
from overlap import ConfigurationError, register
from overlap.hooks import GatherQuantized

from .given import given, of_ranks, reduced

SIZES = [1, 512, 2000]
HOOKS = [
    (overlap.quantization_pertensor_hook, None),
    (overlap.quantization_perchannel_hook, 512),
    (GatherQuantized(100), 100),
]


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
                atol=1e-6,
                reason="the span of values is halved here before it is divided, so that none is too large",
            )
        assert_equal_ranks(got)


@on_ranks(2)
def test_means_equal_pytorchs_however_the_hook_is_registered(rank: int, world_size: int) -> None:
    for hook, chunk in HOOKS:
        _equals_torchs(rank, world_size, hook, chunk)


def test_a_chunk_of_no_values_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="chunk must be a whole number of at least 1, got 0"):
        GatherQuantized(0)
