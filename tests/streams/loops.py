"""Training loops that scenarios are played with. Each takes a model and its optimizers, overlapped or plain."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import overlap
from overlap import ClipGradNorm, Int8, Join, PeerError, SkipNonFinite, auto_quantize
from overlap.activations import offload
from overlap.hooks.engine.registration import registration_of

from .model import batch

__all__ = [
    "Game",
    "Loop",
    "accumulates",
    "fails",
    "fails_in_a_stage",
    "joins",
    "joins_iterating",
    "joins_knowing",
    "logs",
    "quantizes",
    "offloads",
    "removes",
    "resumes",
    "scales",
    "stops_halfway",
    "trains_long",
    "trains",
]

_STEPS = 4  # Buckets are cut anew after the first, and chains run on streams of their own from the second on.


@dataclass
class Game:
    """One model on one rank, in training."""

    ddp: DistributedDataParallel
    optimizers: list[Any]
    rank: int
    is_plain: bool = False
    """Whether the optimizers are PyTorch's and no chain is registered."""
    edit: Callable[[DistributedDataParallel], None] = lambda ddp: None
    """What a plain loop does between backward and step, which the chain does by itself."""
    step: int = 0
    build: Callable[[Any], list[Any]] | None = None
    batches: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def loss(self) -> Tensor:
        tokens, target = self.batches.get(self.step) or batch(self.step, self.rank)
        self.step += 1
        loss: Tensor = torch.nn.functional.mse_loss(self.ddp(tokens), target)
        return loss

    def update(self) -> None:
        if self.is_plain:
            self.edit(self.ddp)
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


def quantizes(game: Game) -> None:
    """Collectives outside of any backward, waited for some time after they were asked for."""
    reduce, scatter = dist.all_reduce, dist.reduce_scatter
    if not game.is_plain:
        reduce, scatter = auto_quantize(reduce, Int8()), auto_quantize(scatter, Int8())
    for _ in range(_STEPS):
        sums = [parameter.detach().clone() for parameter in game.ddp.parameters()]
        own = torch.zeros_like(sums[0])
        works = [reduce(one, async_op=True) for one in sums]
        # Nobody else keeps the tensors that are reduced here.
        works.append(scatter(own, [own.neg() for _ in range(dist.get_world_size())], async_op=True))
        torch.empty_like(next(game.ddp.parameters()))  # It may get their memory.
        for work in works:
            work.wait()
        for parameter, one in zip(game.ddp.parameters(), sums, strict=True):
            parameter.data.add_(one, alpha=0.1)


def logs(game: Game) -> None:
    """The results of stages are read after each backward."""
    registration = registration_of(game.ddp)
    for _ in range(_STEPS):
        game.loss().backward()
        if registration is not None:
            for stage in registration.stage.sequence:
                found = getattr(stage, "norm", None) if isinstance(stage, ClipGradNorm) else None
                found = stage.skipped if isinstance(stage, SkipNonFinite) else found
                if found is not None:
                    found.mul(2)
                del found
        game.update()
    if registration is not None:
        registration.remove()


def offloads(game: Game) -> None:
    """All that is offloaded leaves the device, however little it is."""
    with mock.patch.object(offload, "IN_FLIGHT_BYTES", 0):
        trains(game)


def stops_halfway(game: Game) -> None:
    """Backward ends in the last layer, so that tensors that were prefetched for others are dropped."""
    model = game.ddp.module
    with mock.patch.object(offload, "IN_FLIGHT_BYTES", 0):
        for step in range(_STEPS):
            tokens, _ = batch(step, game.rank) if not game.batches else game.batches[step]
            torch.autograd.grad(model(tokens).sum(), model.head.weight)
            torch.autograd.grad(model(tokens).sum(), model.layers[2][0].weight)


def accumulates(game: Game) -> None:
    for _ in range(_STEPS - 1):
        with game.ddp.no_sync():
            game.loss().backward()
        game.loss().backward()
        game.update()


def scales(game: Game) -> None:
    """With `GradScaler`, whose own wait for the verdict is in PyTorch."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for _ in range(_STEPS):
        scaler.scale(game.loss()).backward()
        if game.is_plain:
            scaler.unscale_(game.optimizers[0])
            game.edit(game.ddp)
        for optimizer in game.optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()


def joins(game: Game) -> None:
    """Ranks run out of inputs at different times, and nobody knows when."""
    with Join([game.ddp, *game.optimizers]):
        for _ in range(2 + 2 * game.rank):
            game.loss().backward()
            game.update()


def joins_iterating(game: Game) -> None:
    """The same over a loader without length, polled one batch ahead."""
    with Join([game.ddp, *game.optimizers]) as join:
        for _ in join.iterate(iter(range(2 + 2 * game.rank))):
            game.loss().backward()
            game.update()


def joins_knowing(game: Game) -> None:
    """The same with lengths that all ranks know."""
    with Join([game.ddp, *game.optimizers], lengths=2 + 2 * game.rank):
        for _ in range(2 + 2 * game.rank):
            game.loss().backward()
            game.update()


def fails(game: Game) -> None:
    """One backward ends with an error on every rank, and training goes on."""
    trains(game)
    handle = game.ddp.module.embedding.weight.register_hook(_broken)
    with contextlib.suppress(ValueError):
        game.loss().backward()
    handle.remove()
    _forget(game)
    trains(game)


def fails_in_a_stage(game: Game) -> None:
    """A function of a chain raises on every rank, when some of the buckets have been sent."""
    with contextlib.suppress(ValueError, PeerError):  # A rank that comes there late has the other's error first.
        trains(game)
    _forget(game)
    trains(game)


def _forget(game: Game) -> None:
    for optimizer in game.optimizers:
        optimizer.zero_grad()
    if game.is_plain:
        game.ddp.reducer._reset_state()
        game.ddp.zero_grad()


def _broken(gradient: Tensor) -> Tensor:
    raise ValueError("broken on purpose")


def resumes(game: Game) -> None:
    """State is saved and loaded in the middle."""
    trains(game)
    if not game.is_plain:
        optimizers = game.optimizers if len(game.optimizers) > 1 else game.optimizers[0]
        file = io.BytesIO()
        torch.save(overlap.state_dict(game.ddp, optimizers), file)
        file.seek(0)
        overlap.load_state_dict(game.ddp, optimizers, torch.load(file, weights_only=True))
    trains(game)


def removes(game: Game) -> None:
    """The chain is taken out and another one put in."""
    trains(game)
    if not game.is_plain:
        registration = registration_of(game.ddp)
        assert registration is not None and game.build is not None
        registration.remove()
        game.optimizers = game.build(game.ddp)
    trains(game)
