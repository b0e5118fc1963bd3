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


class _Tells(nn.Module):
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


def _weighed(rank: int, world_size: int) -> None:
    batches = [_batch(rank, number) for number in range(len(_SIZES[rank]))]
    for divides in (True, False):
        for kind, samples in ((None, True), (AllReduce, True), (AllGather, lambda batch: len(batch[0]))):
            reference = _Tells()
            plain = torch.optim.SGD(reference.parameters(), lr=0.5)
            ddp = wrap(_Tells(), **MLP.ddp_options())
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
            if kind is not None:
                chain(kind(), Step(optimizer)).register(ddp)
            joinables = [ddp] if kind is not None else [ddp, optimizer]
            with Join(joinables, weight_by_samples=samples, divide_by_initial_world_size=divides) as join:
                for x, y in join.iterate(batches):
                    ddp(x, y).loss.backward()
                    if kind is None:
                        optimizer.step()
                        optimizer.zero_grad()
            for number in range(max(map(len, _SIZES[:world_size]))):
                present = [_batch(r, number) for r in range(world_size) if number < len(_SIZES[r])]
                plain.zero_grad()
                x, y = (torch.cat(parts) for parts in zip(*present, strict=True))
                reference(x, y).loss.backward()
                plain.step()
            for ours, theirs in zip(ddp.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_mean_is_over_samples() -> None:
    run_ranks(_weighed, 3)


def _wrong(rank: int, world_size: int) -> None:
    ddp = wrap(MLP.model(), **MLP.ddp_options())
    with pytest.raises(ConfigurationError, match="found None samples"), Join([ddp], weight_by_samples=True) as join:
        list(join.iterate(["a batch of words"]))
    with (
        pytest.raises(ConfigurationError, match=r"needs `for batch in join\.iterate"),
        Join([ddp], weight_by_samples=True),
    ):
        ddp(torch.zeros(1, 16))


def test_samples_that_cannot_be_counted() -> None:
    run_ranks(_wrong, 2)
