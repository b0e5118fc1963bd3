"""Small models for parity tests, each with its data.

DDP caps its first bucket at 1 MiB only if `bucket_cap_mb` is left out; with `BUCKET_CAP_MB` all buckets
close at 1 KiB. Without `find_unused_parameters` the first iteration still has one bucket per dtype; the
rebuild after it makes three or more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BUCKET_CAP_MB = 1024 / 2**20
_WIDTH = 16  # a weight of 16 x 16 float32 fills a bucket


@dataclass(frozen=True)
class Batch:
    """What one rank feeds its model in one step."""

    inputs: tuple[Any, ...]
    target: Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and its data; `case.model()` and `case.batch(step, rank)` depend on their arguments alone."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[torch.Generator, int, int], tuple[Any, ...]]
    find_unused_parameters: bool = False

    def __str__(self) -> str:
        return self.name

    def model(self, *, seed: int = 0) -> nn.Module:
        """The same weights for the same seed, whatever the state of torch's global generator."""
        model = self.build()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, param in model.named_parameters():
                _initialize(name, param, generator)
        return model

    def batch(self, step: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(1_000_003 * step + rank)
        inputs = self.inputs(generator, step, rank)
        return Batch(inputs, torch.randn(inputs[0].shape[0], _WIDTH, generator=generator))

    def batches(self, rank: int, *, steps: int, start: int = 0) -> list[Batch]:
        return [self.batch(step, rank) for step in range(start, start + steps)]

    def ddp_options(self) -> dict[str, Any]:
        """What `DistributedDataParallel` needs for this model, small buckets included."""
        return {"bucket_cap_mb": BUCKET_CAP_MB, "find_unused_parameters": self.find_unused_parameters}


def mean_squared_error(ddp: nn.Module, batch: Batch) -> Tensor:
    """The loss of every case."""
    loss: Tensor = nn.functional.mse_loss(ddp(*batch.inputs), batch.target)
    return loss


def _initialize(name: str, param: Tensor, generator: torch.Generator) -> None:
    if param.ndim >= 2:
        bound = param.shape[1:].numel() ** -0.5
        values = torch.empty(param.shape).uniform_(-bound, bound, generator=generator)
    else:
        center = 1.0 if name.endswith("weight") else 0.0  # of a norm
        values = torch.empty(param.shape).normal_(center, 0.1, generator=generator)
    param.copy_(values)


def _features(generator: torch.Generator, step: int, rank: int) -> tuple[Any, ...]:
    return (torch.randn(4, _WIDTH, generator=generator),)


def _tokens(generator: torch.Generator, step: int, rank: int) -> tuple[Any, ...]:
    return (torch.randint(0, 32, (4, 6), generator=generator),)


def _branch_never(generator: torch.Generator, step: int, rank: int) -> tuple[Any, ...]:
    return (*_features(generator, step, rank), False)


def _branch_in_turn(generator: torch.Generator, step: int, rank: int) -> tuple[Any, ...]:
    return (*_features(generator, step, rank), (rank + step) % 2 == 1)


def _mlp() -> nn.Sequential:
    layers = [layer for _ in range(4) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(_WIDTH, _WIDTH))


def _batch_norm() -> nn.Sequential:
    layers = [layer for _ in range(4) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.BatchNorm1d(_WIDTH))]
    return nn.Sequential(*layers, nn.Linear(_WIDTH, _WIDTH))


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.inner = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.Tanh(), nn.Linear(2 * _WIDTH, _WIDTH))
        self.last = nn.Linear(_WIDTH, _WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x).tanh()))


class _Dtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_float32 = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, _WIDTH))
        self.in_float64 = nn.Linear(_WIDTH, _WIDTH, dtype=torch.float64)
        self.in_bfloat16 = nn.Linear(_WIDTH, _WIDTH, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.in_bfloat16(x.bfloat16()).float()
        return self.in_float32(narrow) + self.in_float64(x.double()).float()


class _Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = _mlp()
        self.branch = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor, use_branch: bool) -> Tensor:
        out: Tensor = self.trunk(x)
        return out + self.branch(x) if use_branch else out


class _Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = _mlp()
        self.nothing = nn.Parameter(torch.empty(0, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.trunk(x), self.nothing])


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, _WIDTH)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(_WIDTH, 2, 2 * _WIDTH, dropout=0.0, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)).mean(dim=1))


MLP = Case(name="mlp", build=_mlp, inputs=_features)
BATCH_NORM = Case(name="batch_norm", build=_batch_norm, inputs=_features)
TIED = Case(name="tied", build=_Tied, inputs=_features)
DTYPES = Case(name="dtypes", build=_Dtypes, inputs=_features)
EMPTY = Case(name="empty", build=_Empty, inputs=_features)
TRANSFORMER = Case(name="transformer", build=_Transformer, inputs=_tokens)
UNUSED = Case(name="unused", build=_Branch, inputs=_branch_never, find_unused_parameters=True)
UNUSED_ON_SOME_RANKS = Case(
    name="unused_on_some_ranks", build=_Branch, inputs=_branch_in_turn, find_unused_parameters=True
)
