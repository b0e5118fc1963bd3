"""A model whose gradients are given, so that what a reducer makes of them is known."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlap import register


class Given(nn.Module):
    """A model whose gradients are what it is called with, in buckets of their own."""

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(size, dtype=dtype)) for size in sizes])

    def forward(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))


def given(sizes: Sequence[int], stage: Any, dtype: torch.dtype = torch.float32) -> DistributedDataParallel:
    """The model in DDP, with `stage` registered if there is one."""
    ddp = DistributedDataParallel(Given(sizes, dtype), bucket_cap_mb=1e-6)
    if stage is not None:
        register(ddp, stage)
        # DDP's first pass has one bucket for all.
        reduced(ddp, [torch.zeros(size, dtype=dtype) for size in sizes])
    return ddp


def reduced(ddp: DistributedDataParallel, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a backward with these gradients leaves in `.grad`."""
    ddp.zero_grad()
    ddp(gradients).backward()
    return [w.grad.detach().clone() for w in ddp.module.weights]


def of_ranks(world_size: int, sizes: Sequence[int], step: int = 0) -> list[list[torch.Tensor]]:
    """Gradients by rank, the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(step)
    return [[torch.randn(size, generator=generator) for size in sizes] for _ in range(world_size)]
