"""The mean over samples, where ranks have batches of different sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from harness import run_ranks, wrap
from harness.models import MLP
from overlap import AllGather, AllReduce, ConfigurationError, Join, Step, chain

# Samples of each rank's batches.
_SIZES = ((4, 4, 1), (4, 2), (3, 3, 3, 5))
# What reduces gradients, and how samples are counted.
REDUCERS: dict[str, tuple[Any, Any]] = {
    "no hook": (None, True),
    "all-reduce": (AllReduce, True),
    "all-gather": (AllGather, lambda batch: len(batch[0])),
}


class _ReturnsLoss(nn.Module):
    """Returns what its loss is made of, too: outputs that depend on each other, in an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MLP.model()

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        y = self.model(x)
        return SimpleNamespace(outputs=[y, y[:1]], loss=nn.functional.mse_loss(y, target))


def _batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + number)
    size = _SIZES[rank][number]
    return torch.randn(size, 16, generator=generator), torch.randn(size, 16, generator=generator)


def _train_on_all_samples(world_size: int) -> nn.Module:
    """One process, whose batches are those of all ranks together."""
    model = _ReturnsLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(max(map(len, _SIZES[:world_size]))):
        present = [_batch(rank, number) for rank in range(world_size) if number < len(_SIZES[rank])]
        optimizer.zero_grad()
        x, y = (torch.cat(parts) for parts in zip(*present, strict=True))
        model(x, y).loss.backward()
        optimizer.step()
    return model


def _weighted(rank: int, world_size: int, reducer: str, divides: bool) -> None:
    kind, samples = REDUCERS[reducer]
    ddp = wrap(_ReturnsLoss(), **MLP.ddp_options())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    if kind is not None:
        chain(kind(), Step(optimizer)).register(ddp)
    joinables = [ddp] if kind is not None else [ddp, optimizer]
    batches = [_batch(rank, number) for number in range(len(_SIZES[rank]))]
    with Join(joinables, weight_by_samples=samples, divide_by_initial_world_size=divides) as join:
        for x, y in join.iterate(batches):
            ddp(x, y).loss.backward()
            if kind is None:
                optimizer.step()
                optimizer.zero_grad()
    for ours, theirs in zip(ddp.parameters(), _train_on_all_samples(world_size).parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def _all_weighted(rank: int, world_size: int) -> None:
    for reducer in REDUCERS:
        for divides in (True, False):
            _weighted(rank, world_size, reducer, divides)


def test_the_mean_is_over_samples() -> None:
    run_ranks(_all_weighted, 3)


def _refused(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    with pytest.raises(ConfigurationError, match="found None samples"), Join([ddp], weight_by_samples=True) as join:
        list(join.iterate(["a batch of words"]))
    with (
        pytest.raises(ConfigurationError, match=r"needs `for batch in join\.iterate"),
        Join([ddp], weight_by_samples=True),
    ):
        ddp(torch.zeros(1, 16))


def test_samples_that_cannot_be_counted_are_refused() -> None:
    run_ranks(_refused, 2)
