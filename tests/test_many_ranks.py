"""Every chain of docs/chains.md once with more ranks: equal on all of them, and to plain DDP as far as it claims to be.

Four ranks; ``make soak`` runs it with 8 and 16 (``MANY_RANKS``).
"""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compositions.sentences import ADAMW, Build, local, sharded, with_update
from harness import on_ranks
from overlap import (
    AllReduce,
    BFloat16,
    Cast,
    ClipGradNorm,
    Int4,
    Int8,
    Join,
    PowerSGD,
    Quantize,
    Stage,
    TopK,
    route,
)

_RANKS = int(os.environ.get("MANY_RANKS", "4"))
_STEPS = 3
# Of the largest weight: Gloo's ring adds ranks in another order than the owner of a shard does.
_ORDER = 1e-5


def _mixed() -> Stage:
    return route({"0.*": AllReduce(), "*.bias": Cast(torch.bfloat16, AllReduce()), "*": PowerSGD(rank=2, wire=Int8())})


# How far from plain DDP's weights, of the largest of them; `None`: it trains otherwise, and only equality of ranks
# counts.
_CHAINS: dict[str, tuple[Build, float | None]] = {
    "AllReduce, Step": (with_update(AllReduce), 0.0),
    "AllReduce, Step, deferred": (with_update(AllReduce, deferred=True), 0.0),
    "AllReduce, Step, released": (with_update(AllReduce, release_gradients=True), 0.0),
    "ZeroStep": (sharded(), _ORDER),
    "ZeroStep, in forward": (sharded(gather="forward"), _ORDER),
    "ZeroStep, deferred": (sharded(deferred=True), _ORDER),
    "ZeroStep, by parameter": (sharded(partition="parameter"), _ORDER),
    "AllReduce, ZeroStep": (sharded(AllReduce), 0.0),
    "Int8, ZeroStep, in forward": (sharded(lambda: Quantize(Int8()), gather="forward"), 0.1),
    "clipped": (with_update(AllReduce, lambda: ClipGradNorm(0.1)), None),
    "bfloat16": (with_update(lambda: Cast(torch.bfloat16, AllReduce())), 0.1),
    "bfloat16 by a wire": (with_update(lambda: Quantize(BFloat16())), 0.1),
    "Int8": (with_update(lambda: Quantize(Int8())), 0.1),
    "Int4 with feedback": (with_update(lambda: Quantize(Int4(), error_feedback=True)), None),
    "TopK with feedback": (with_update(lambda: Quantize(TopK(0.1), error_feedback=True)), None),
    "PowerSGD": (with_update(lambda: PowerSGD(rank=2, min_compression_rate=1)), None),
    "route": (with_update(_mixed), None),
    "LocalSGD": (local(period=_STEPS, start_step=0), None),
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 31), nn.Tanh(), nn.Linear(31, 7))


def _trained(build: Build, rank: int, *, is_joined: bool) -> Tensor:
    """The weights after a few steps; if joined, ranks have one step more or less."""
    ddp = DistributedDataParallel(copy.deepcopy(_model()), bucket_cap_mb=0.003, gradient_as_bucket_view=True)
    (optim,) = build(ddp)
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 20, generator=generator) for _ in range(_STEPS + (is_joined and rank % 3))]
    with Join([ddp, optim] if hasattr(optim, "join_hook") else [ddp], enable=is_joined):
        for batch in batches:
            optim.zero_grad()
            ddp(batch).square().mean().backward()
            optim.step()
    if hasattr(optim, "wait"):
        optim.wait()
    return torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])


@pytest.mark.timeout(1200)
@on_ranks(_RANKS, timeout_s=1080, group_timeout_s=60)
def test_every_chain_is_right_on_many_ranks(rank: int) -> None:
    wrong: dict[str, str] = {}
    for is_joined in (False, True):
        plain = _trained(lambda ddp: [ADAMW(ddp.parameters())], rank, is_joined=is_joined)
        for name, (build, bound) in _CHAINS.items():
            weights = _trained(build, rank, is_joined=is_joined)
            least, most = weights.clone(), weights.clone()
            dist.all_reduce(least, dist.ReduceOp.MIN)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            if not torch.equal(least, most):
                wrong[f"{name}, {is_joined=}"] = f"ranks differ by {(most - least).max():.3g}"
            distance = float((weights - plain).abs().max() / plain.abs().max())
            if not distance <= (bound if bound is not None else 1.0):
                wrong[f"{name}, {is_joined=}"] = f"{distance:.3g} from plain DDP"
    assert not wrong
