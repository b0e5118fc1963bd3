"""The update in backward is the update by hand; ranks are equal; sums that are exact are, at any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overlap import AllReduce, Hierarchical, OverlappedOptimizer, Step, ZeroRedundancyOptimizer, ZeroStep
from overlap import chain as chained

from .chains import CHAINS
from .check import Check
from .training import STEPS, train

__all__ = ["parity_checks"]

_RANKS = 4
_FEATURES = 50


@dataclass(frozen=True)
class Parity:
    """Exact at one and two ranks but for norms, which are summed in other orders and then multiply every gradient."""

    chain: str

    def __call__(self, rank: int, world_size: int, device: torch.device) -> dict[str, Any]:
        chain = CHAINS[self.chain]
        losses, parameters = train(chain, rank, device)
        assert bool(parameters.isfinite().all())
        figures: dict[str, Any] = {"first_loss": float(losses[0]), "last_loss": float(losses[-1])}
        if chain.by_hand is not None:
            by_hand = train(chain, rank, device, build=chain.by_hand)
            differences = {
                f"{what}_difference": float((ours - theirs).abs().max() / theirs.abs().max())
                for what, ours, theirs in zip(("loss", "parameter"), (losses, parameters), by_hand, strict=True)
            }
            figures |= differences
            assert max(differences.values()) <= chain.tolerance, (
                f"{self.chain} is not the update by hand: {differences}"
            )
        if chain.equal_every and STEPS % chain.equal_every == 0:
            figures["ranks_equal"] = _ranks_equal(parameters, device)
            assert figures["ranks_equal"], f"{self.chain}: ranks have different parameters"
        return figures


def _ranks_equal(parameters: torch.Tensor, device: torch.device) -> bool:
    ours = parameters.to(device)
    lowest, highest = ours.clone(), ours.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    return torch.equal(lowest, highest)


class _Scores(nn.Module):
    """Its gradients are its inputs: where these are small whole numbers, every sum is exact in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(_FEATURES)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([(weight * x).sum() for weight in self.weights]).sum()


@dataclass(frozen=True)
class ExactSums:
    """Four ranks: the mean divides by a power of two, so that plain DDP, which divides first, is exact as well."""

    update: str

    def __call__(self, rank: int, world_size: int, device: torch.device) -> None:
        plain, ddp = (
            DistributedDataParallel(_Scores().to(device), bucket_cap_mb=4 * _FEATURES / 2**20) for _ in range(2)
        )
        by_hand = torch.optim.SGD(plain.parameters(), lr=0.5, momentum=0.5)
        ours = self._registered(ddp)
        for step in range(4):
            x = torch.arange(_FEATURES, device=device).mul(rank + step + 1).remainder(17).float()
            for model, optimizer in ((plain, by_hand), (ddp, ours)):
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()
        if isinstance(ours, ZeroRedundancyOptimizer):
            ours.wait()
        for one, other in zip(ddp.parameters(), plain.parameters(), strict=True):
            assert bool(one.any())
            assert torch.equal(one, other), f"{self.update} at {world_size} ranks: up to {(one - other).abs().max():g}"

    def _registered(self, ddp: DistributedDataParallel) -> Any:
        if self.update.startswith("ZeroStep"):
            zero = ZeroRedundancyOptimizer(
                ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.5, momentum=0.5
            )
            chained(ZeroStep(zero, gather="forward" if "forward" in self.update else "backward")).register(ddp)
            return zero
        optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.5))
        reducer = Hierarchical(outer=AllReduce(), machine_size=2) if "Hierarchical" in self.update else AllReduce()
        chained(reducer, Step(optimizer)).register(ddp)
        return optimizer


def parity_checks() -> list[Check]:
    updates = ("AllReduce, Step", "Hierarchical, Step", "ZeroStep", "ZeroStep, gather in forward")
    return [
        *(Check(name=f"parity: {name}", topic="parity", run=Parity(name)) for name in CHAINS),
        *(
            Check(name=f"parity of one rank: {name}", topic="parity", run=Parity(name), ranks=1)
            for name in ("AllReduce, Step", "ZeroStep", "ZeroStep, gather in forward", "PowerSGD, Step")
        ),
        *(
            Check(name=f"parity at {_RANKS} ranks: {update}", topic="parity", run=ExactSums(update), ranks=_RANKS)
            for update in updates
        ),
    ]
