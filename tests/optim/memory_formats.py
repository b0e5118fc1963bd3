"""Models whose parameters are dense but not contiguous."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from harness.models import Case

WIDTH = 16


def _images(generator: torch.Generator, step: int, rank: int) -> tuple[Tensor, ...]:
    return (torch.randn(3, 3, 6, 6, generator=generator),)


def _volumes(generator: torch.Generator, step: int, rank: int) -> tuple[Tensor, ...]:
    return (torch.randn(3, 2, 4, 4, 4, generator=generator),)


def _features(generator: torch.Generator, step: int, rank: int) -> tuple[Tensor, ...]:
    return (torch.randn(3, WIDTH, generator=generator),)


def _convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Tanh(),
        nn.ConvTranspose2d(8, 6, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(6, 4, 1),
        nn.Conv2d(4, 5, 3),
        nn.Flatten(),
        nn.Linear(5 * 16, WIDTH),
    )


def _channels_last() -> nn.Module:
    return _convolutions().to(memory_format=torch.channels_last)


def _channels_last_3d() -> nn.Module:
    layers = nn.Sequential(
        nn.Conv3d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv3d(8, 5, 3), nn.Flatten(), nn.Linear(5 * 8, WIDTH)
    )
    return layers.to(memory_format=torch.channels_last_3d)


class _Permuted(nn.Module):
    """A linear layer over a transposed view, and a weight whose middle dimension is the outermost in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 12)
        self.first.weight = nn.Parameter(torch.empty(WIDTH, 12).t())
        self.mixed = nn.Parameter(torch.empty(4, 3, 6).permute(1, 0, 2))
        self.last = nn.Linear(18, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).tanh().view(-1, 3, 4)
        found: Tensor = self.last(torch.einsum("nij,ijk->nik", hidden, self.mixed).flatten(1))
        return found


CONTIGUOUS = Case(name="contiguous convolutions", build=_convolutions, inputs=_images)
CHANNELS_LAST = Case(name="channels_last", build=_channels_last, inputs=_images)
CHANNELS_LAST_3D = Case(name="channels_last_3d", build=_channels_last_3d, inputs=_volumes)
PERMUTED = Case(name="permuted", build=_Permuted, inputs=_features)
FORMATS = [CHANNELS_LAST, CHANNELS_LAST_3D, PERMUTED]
