"""Random small models. What each block is follows from its name alone, so their names name a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["BLOCKS", "FRONTS", "WIDTH", "Net", "batch", "loss_of"]

WIDTH = 12
_TOKENS = 24


class _Cast(nn.Module):
    """A layer in a dtype of its own."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner.to(dtype), dtype

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x.to(self.dtype))
        return (out.abs() if out.is_complex() else out).to(x.dtype)


class _Scalars(nn.Module):
    """Parameters of no dimension, and of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(1.1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class _Empty(nn.Module):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum()


class _Unused(nn.Module):
    """A layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class _InTurns(nn.Module):
    """A layer that every other forward uses; ``first`` says which rank begins with it, -1 that all do."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        self._first = first

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        late = self._first >= 0 and torch.distributed.get_rank() != self._first
        out = self.always(x)
        return out + self.sometimes(x) if (self.calls + late) % 2 else out


class _Transposed(nn.Module):
    """A weight that lies transposed in memory, and is dense."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH).mul_(0.2).t())
        self.back = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.back((x @ self.weight).tanh())


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _mlp()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Sequential(nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)))


def _frozen() -> nn.Module:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    layers[0].requires_grad_(False)
    layers[1].bias.requires_grad_(False)
    return layers


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "nested": _mlp,
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)),
    "scalars": _Scalars,
    "empty": _Empty,
    "frozen": _frozen,
    "transposed": _Transposed,
    "checkpointed": _Checkpointed,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    # As often as it is named, and yet once.
    "shared": lambda: nn.Linear(WIDTH, WIDTH),
    "float64": lambda: _Cast(nn.Linear(WIDTH, WIDTH), torch.float64),
    "bfloat16": lambda: _Cast(nn.Linear(WIDTH, WIDTH), torch.bfloat16),
    "complex": lambda: _Cast(nn.Linear(WIDTH, WIDTH), torch.complex64),
    "unused": _Unused,
    "in turns": lambda: _InTurns(-1),
    "in turns by rank": lambda: _InTurns(0),
}

_OF_A_DTYPE = ("float64", "bfloat16", "complex")


def _images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, WIDTH, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )


class _Tokens(nn.Module):
    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, WIDTH, sparse=sparse)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens).mean(dim=1)


FRONTS: dict[str, Callable[[], nn.Module]] = {
    "features": lambda: nn.Linear(WIDTH, WIDTH),
    "images": _images,
    "channels last": lambda: _images().to(memory_format=torch.channels_last),
    "tokens": lambda: _Tokens(sparse=False),
    "sparse tokens": lambda: _Tokens(sparse=True),
}


class Net(nn.Module):
    """``Net("tokens", "linear", "batch norm")``: a front, blocks one after another, a head."""

    def __init__(self, front: str, *blocks: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shared = BLOCKS["shared"]()
        made = [shared if name == "shared" else BLOCKS[name]() for name in blocks]
        self.front = FRONTS[front]()
        self.blocks = nn.ModuleList(made)
        self.head = nn.Linear(WIDTH, 5)
        self.dtype = dtype
        if dtype != torch.float32:
            kept = {
                id(each)
                for block, name in zip(made, blocks, strict=True)
                if name in _OF_A_DTYPE
                for each in block.parameters()
            }
            for parameter in self.parameters():
                if id(parameter) not in kept:
                    parameter.data = parameter.data.to(dtype)
            for module in self.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    if buffer.is_floating_point():
                        setattr(module, name, buffer.to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        out = self.front(x if x.dtype == torch.int64 else x.to(self.dtype))
        for block in self.blocks:
            out = block(out).tanh()
        return self.head(out)


def batch(front: str, number: int, rank: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    """Inputs and targets, which depend on the arguments alone."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    if "tokens" in front:
        x = torch.randint(0, _TOKENS, (rows, 5), generator=generator)
    elif front == "features":
        x = torch.randn(rows, WIDTH, generator=generator)
    else:
        x = torch.randn(rows, 3, 7, 7, generator=generator)
    return x, torch.randn(rows, 5, generator=generator)


def loss_of(ddp: Any, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(ddp(x).float(), y)
