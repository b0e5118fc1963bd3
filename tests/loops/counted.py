"""Batches of different numbers of samples, and a loss that is a sum: the mean over samples."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.nn.functional import mse_loss

from .corpus import loop
from .run import Run

# By batch, of each rank. What one batch or two sum is a power of two, so that plain DDP divides by it without rounding.
COUNTS = ((1, 3), (0, 4), (1, 1), (2, 0), (4, 0), (3, 1))


def _loss(ddp: Any, run: Run, batch: tuple[Tensor, Tensor], numbers: tuple[int, ...]) -> Tensor:
    number = numbers[run.rank]
    run.count(number)
    x, y = batch
    return mse_loss(ddp(x[:number]), y[:number], reduction="sum")


@loop("a count of samples before each backward", steps=4)
def samples(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for batch, numbers in zip(run.batches(), COUNTS, strict=False):
        optimizer.zero_grad()
        loss = _loss(ddp, run, batch, numbers)
        (loss * run.weight(sum(numbers))).backward()
        optimizer.step()
        yield loss


@loop("a count of samples, accumulated under no_sync()", steps=6)
def accumulated(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for place, (batch, numbers) in enumerate(zip(run.batches(), COUNTS, strict=True)):
        is_last = place % 2 == 1
        with nullcontext() if is_last else ddp.no_sync():
            loss = _loss(ddp, run, batch, numbers)
            (loss * run.weight(sum(map(sum, COUNTS[place - place % 2 :][:2])))).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        yield loss


@loop("a count of samples, and accumulated gradients that are discarded", steps=4)
def discarded(ddp: Any, optimizer: Any, run: Run) -> Iterator[Any]:
    for place, (batch, numbers) in enumerate(zip(run.batches(), COUNTS, strict=False)):
        with nullcontext() if place % 2 == 1 else ddp.no_sync():
            loss = _loss(ddp, run, batch, numbers)
            (loss * run.weight(sum(numbers))).backward()
        if place % 2 == 1:
            optimizer.step()
        optimizer.zero_grad()
        yield loss
