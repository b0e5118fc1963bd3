"""Training loops that scenarios are played with. Each takes a model and its optimizers, overlapped or plain."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap import Join, PeerError

from .model import batch

_STEPS = 3  # Buckets are cut anew after the first, and chains run on streams of their own from the second on.
_BATCHES = 16


@dataclass
class Game:
    """One model on one rank, in training."""

    ddp: DistributedDataParallel
    optimizers: list[Any]
    batches: list[tuple[Tensor, Tensor]]
    rank: int
    is_plain: bool = False
    """Whether the optimizers are PyTorch's and no chain is registered."""
    step: int = 0

    @classmethod
    def of(cls, ddp: DistributedDataParallel, rank: int) -> Game:
        """With its batches, and without optimizers yet."""
        device = next(ddp.parameters()).device
        return cls(ddp, [], [batch(step, rank, device) for step in range(_BATCHES)], rank)

    def loss(self) -> Tensor:
        tokens, target = self.batches[self.step]
        self.step += 1
        loss: Tensor = torch.nn.functional.mse_loss(self.ddp(tokens), target)
        return loss

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def settle(self) -> None:
        """Wait for gathers that ride into the next forward."""
        for optimizer in self.optimizers:
            if hasattr(optimizer, "wait"):
                optimizer.wait()


Loop = Callable[[Game], None]


def trains(game: Game) -> None:
    for _ in range(_STEPS):
        game.loss().backward()
        game.update()


def trains_long(game: Game) -> None:
    for _ in range(2):
        trains(game)


def overflows(game: Game) -> None:
    """With `GradScaler`; the second loss is infinite on one rank, and the step is left out on both."""
    scaler = torch.amp.GradScaler(game.batches[0][0].device.type, init_scale=2.0**4)
    for number in range(_STEPS):
        loss = game.loss()
        if number == 1 and game.rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        for optimizer in game.optimizers:
            if game.is_plain or number % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()


def joins(game: Game) -> None:
    """Ranks run out of inputs at different times, and nobody knows when."""
    with Join([game.ddp, *game.optimizers]):
        for _ in range(2 + 2 * game.rank):
            game.loss().backward()
            game.update()


def fails_in_backward(game: Game) -> None:
    """Backward raises on every rank, when some of the buckets have been sent."""

    def broken(gradient: Tensor) -> None:
        raise ValueError("broken on purpose")

    trains(game)
    hook = game.ddp.module.embedding.weight.register_hook(broken)
    with contextlib.suppress(ValueError):
        game.loss().backward()
    hook.remove()
    game.ddp.zero_grad(set_to_none=False)
    trains(game)


def fails_in_a_stage(game: Game) -> None:
    """A function of a chain raises on every rank, when some of the buckets have been sent."""
    with contextlib.suppress(ValueError, PeerError):  # A rank that comes there late has the other's error first.
        trains(game)
    for optimizer in game.optimizers:
        optimizer.zero_grad()
    trains(game)
