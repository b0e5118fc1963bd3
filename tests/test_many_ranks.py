"""Every chain of docs/chains.md once with more ranks: equal on all of them, and to plain DDP as far as it claims to be.

Four ranks; ``make soak`` runs it with 8 and 16 (``MANY_RANKS``).
"""

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from harness import run_ranks
from overlap import (
    AllReduce,
    BFloat16,
    Cast,
    ClipGradNorm,
    Int4,
    Int8,
    Join,
    LocalSGD,
    OverlappedOptimizer,
    PowerSGD,
    Quantize,
    Stage,
    Step,
    TopK,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
    route,
)

_RANKS = int(os.environ.get("MANY_RANKS", "4"))
_STEPS = 3
# Of the largest weight: Gloo's ring adds ranks in another order than the owner of a shard does.
_ORDER = 1e-5

Method = Callable[[DistributedDataParallel], Any]


def _adamw(parameters: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _step(reducer: Callable[[], Stage], *before: Callable[[], Stage], **options: Any) -> Method:
    def build(ddp: DistributedDataParallel) -> Any:
        optim = OverlappedOptimizer(_adamw(ddp.parameters()))
        chain(reducer(), *(make() for make in before), Step(optim, **options)).register(ddp)
        return optim

    return build


def _zero(reducer: Callable[[], Stage] | None = None, partition: str = "element", **options: Any) -> Method:
    def build(ddp: DistributedDataParallel) -> Any:
        zero = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, lr=1e-2, overlap_with_ddp=True, partition=partition
        )
        chain(*([] if reducer is None else [reducer()]), ZeroStep(zero, **options)).register(ddp)
        return zero

    return build


def _local(ddp: DistributedDataParallel) -> Any:
    return LocalSGD(ddp, _adamw(ddp.parameters()), period=_STEPS)


def _mixed() -> Stage:
    return route({"0.*": AllReduce(), "*.bias": Cast(torch.bfloat16, AllReduce()), "*": PowerSGD(rank=2, wire=Int8())})


# How far from plain DDP's weights, of the largest of them; `None`: it trains otherwise, and only equality of ranks
# counts.
_CHAINS: dict[str, tuple[Method, float | None]] = {
    "AllReduce, Step": (_step(AllReduce), 0.0),
    "AllReduce, Step, deferred": (_step(AllReduce, deferred=True), 0.0),
    "AllReduce, Step, released": (_step(AllReduce, release_gradients=True), 0.0),
    "ZeroStep": (_zero(), _ORDER),
    "ZeroStep, in forward": (_zero(gather="forward"), _ORDER),
    "ZeroStep, deferred": (_zero(deferred=True), _ORDER),
    "ZeroStep, by parameter": (_zero(partition="parameter"), _ORDER),
    "AllReduce, ZeroStep": (_zero(AllReduce), 0.0),
    "Int8, ZeroStep, in forward": (_zero(lambda: Quantize(Int8()), gather="forward"), 0.1),
    "clipped": (_step(AllReduce, lambda: ClipGradNorm(0.1)), None),
    "bfloat16": (_step(lambda: Cast(torch.bfloat16, AllReduce())), 0.1),
    "bfloat16 by a wire": (_step(lambda: Quantize(BFloat16())), 0.1),
    "Int8": (_step(lambda: Quantize(Int8())), 0.1),
    "Int4 with feedback": (_step(lambda: Quantize(Int4(), error_feedback=True)), None),
    "TopK with feedback": (_step(lambda: Quantize(TopK(0.1), error_feedback=True)), None),
    "PowerSGD": (_step(lambda: PowerSGD(rank=2, min_compression_rate=1)), None),
    "route": (_step(_mixed), None),
    "LocalSGD": (_local, None),
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 31), nn.Tanh(), nn.Linear(31, 7))


def _plain(ddp: DistributedDataParallel) -> Any:
    return _adamw(ddp.parameters())


def _trained(method: Method, rank: int, *, is_joined: bool) -> Tensor:
    """The weights after a few steps; if joined, ranks have one step more or less."""
    ddp = DistributedDataParallel(copy.deepcopy(_model()), bucket_cap_mb=0.003, gradient_as_bucket_view=True)
    optim = method(ddp)
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


def _all_trained(rank: int, world_size: int, is_joined: bool) -> dict[str, str]:
    """What is wrong, by chain."""
    wrong: dict[str, str] = {}
    plain = _trained(_plain, rank, is_joined=is_joined)
    for name, (method, bound) in _CHAINS.items():
        weights = _trained(method, rank, is_joined=is_joined)
        least, most = weights.clone(), weights.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if not torch.equal(least, most):
            wrong[name] = f"ranks differ by {(most - least).max():.3g}"
        distance = float((weights - plain).abs().max() / plain.abs().max())
        if not distance <= (bound if bound is not None else 1.0):
            wrong[name] = f"{distance:.3g} from plain DDP"
    return wrong


@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_joined", [False, True], ids=["even", "Join"])
def test_every_chain_is_right_on_many_ranks(is_joined: bool) -> None:
    assert run_ranks(_all_trained, _RANKS, is_joined, timeout_s=540, group_timeout_s=60) == [{}] * _RANKS
