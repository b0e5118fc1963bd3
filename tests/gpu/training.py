"""The model and the loop that every chain is tried with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from overlap import Join

from .chains import Build, Chain
from .lateness import LATE_MODEL, Lateness

__all__ = ["STEPS", "Training", "train"]

# DDP rebuilds its buckets after the first, LocalSGD has averaged twice, and gathers of a step meet the next one's.
STEPS = 5
_TOKENS = 32
_WIDTH = 64
# A weight of `_WIDTH` x `_WIDTH` float32 fills a bucket.
_BUCKET_CAP_MB = 4 * _WIDTH**2 / 2**20


class Net(nn.Module):
    """Every kind of parameter that rules tell apart: an embedding, hidden matrices, biases, a branch, a head."""

    def __init__(self, chain: Chain, lateness: Lateness) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_TOKENS, _WIDTH)
        late = [lateness.module()] if lateness.where == LATE_MODEL else []
        layers = (chain.layer(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh())) for _ in range(3))
        self.layers = nn.Sequential(*(part for layer in layers for part in (layer, *late)))
        self.branch = nn.Linear(_WIDTH, _WIDTH) if chain.has_unused else None
        self.head = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, tokens: Tensor, *, uses_branch: bool = False) -> Tensor:
        hidden = self.layers(self.embedding(tokens).mean(dim=1))
        if self.branch is not None and uses_branch:
            hidden = hidden + self.branch(hidden)
        out: Tensor = self.head(hidden)
        return out


@dataclass(kw_only=True)
class Training:
    """A model with a chain, or trained by hand, and its loop."""

    chain: Chain
    ddp: DistributedDataParallel
    optimizers: Sequence[Any]
    rank: int

    @classmethod
    def of(
        cls,
        chain: Chain,
        rank: int,
        device: torch.device,
        *,
        build: Build | None = None,
        lateness: Lateness | None = None,
    ) -> Training:
        """With `build` in the place of the chain's own; the same weights on every rank and in every call."""
        torch.manual_seed(0)
        model = Net(chain, lateness or Lateness(device)).to(device)
        ddp = DistributedDataParallel(model, bucket_cap_mb=_BUCKET_CAP_MB, **chain.ddp_options)
        return cls(chain=chain, ddp=ddp, optimizers=(build or chain.build)(ddp), rank=rank)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """This rank's batch of that number, on the model's device."""
        device = next(self.ddp.parameters()).device
        generator = torch.Generator().manual_seed(1000 * number + self.rank)
        tokens = torch.randint(0, _TOKENS, (4, 6), generator=generator)
        return tokens.to(device), torch.randn(4, _WIDTH, generator=generator).to(device)

    def step(self, number: int, batch: tuple[Tensor, Tensor]) -> Tensor:
        """One step, with nothing in it but the model, the chain and the loop; returns the loss."""
        tokens, target = batch
        loss = nn.functional.mse_loss(self.ddp(tokens, uses_branch=number % 2 == 0), target)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def run(self, steps: int = STEPS) -> list[Tensor]:
        """Trains, for fewer steps on every other rank under a Join; returns the losses."""
        batches = list(enumerate(map(self.batch, range(steps))))
        if not self.chain.join:
            return [self.step(number, batch) for number, batch in batches]
        with Join([self.ddp, *self.optimizers]) as join:
            ours = batches[: steps - 2 * (self.rank % 2)]
            loader = join.iterate(ours if self.chain.join == "known" else iter(ours))
            return [self.step(number, batch) for number, batch in loader]

    def parameters(self) -> Tensor:
        """All of them in one tensor on the CPU, once what the last step has left in flight is there."""
        for optimizer in self.optimizers:
            if hasattr(optimizer, "wait"):
                optimizer.wait()
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.ddp.parameters()]).cpu()


def train(
    chain: Chain,
    rank: int,
    device: torch.device,
    *,
    build: Build | None = None,
    lateness: Lateness | None = None,
    steps: int = STEPS,
) -> tuple[Tensor, Tensor]:
    """Losses, shape `(steps,)`, and the parameters at the end, in one tensor; both on the CPU."""
    lateness = lateness or Lateness(device)
    with lateness:
        training = Training.of(chain, rank, device, build=build, lateness=lateness)
        losses = training.run(steps)
        return torch.stack(losses).cpu(), training.parameters()
