"""Tiny models of the corpus, all of several buckets of 1 KiB, their inputs and groups of their parameters."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

WIDTH = 16
ADAMW = partial(optim.AdamW, lr=0.01)


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    )


def features(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, WIDTH, generator=generator), torch.randn(4, WIDTH, generator=generator)


def tokens(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randint(0, 32, (4, 6), generator=generator), torch.randn(4, 6, WIDTH, generator=generator)


def images(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randn(4, WIDTH, generator=generator)


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, WIDTH),
    )


def batch_norm() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
    )


def dropout() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Linear(16, 16)
    )


def decay_groups(ddp: nn.Module) -> list[dict[str, Any]]:
    parameters = list(ddp.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0, "lr": 0.05},
    ]
