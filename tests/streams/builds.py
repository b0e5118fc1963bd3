"""Chains that scenarios register, and the optimizers of their loops.

A function that ends in ``(ddp)`` is a build itself; the others take stages or options and return one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bucket_functions import add_noise
from harness.streams import active
from overlap import (
    AllReduce,
    LocalSGD,
    Log,
    OverlappedOptimizer,
    PowerSGD,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
    declare,
    route,
)
from overlap._torch.device import default_stream
from overlap.hooks import PostLocal, PostLocalSGDState

from .model import matrices, rest
from .scenario import Build, Make

__all__ = [
    "ADAMW",
    "MUON",
    "SGD",
    "adamw",
    "clip_values",
    "factors",
    "factors_that_end",
    "failing",
    "hook",
    "local_sgd",
    "log",
    "muon_and_adamw",
    "noise",
    "on_default",
    "on_default_in_backward",
    "on_default_sharded",
    "post_local",
    "reduce",
    "routed",
    "step",
    "two_steps",
    "two_zeros",
    "zero",
    "zero_and_step",
]

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
MUON = functools.partial(torch.optim.Muon, lr=0.02)


def adamw(ddp: Any) -> list[Any]:
    return [ADAMW(ddp.parameters())]


def muon_and_adamw(ddp: Any) -> list[Any]:
    return [MUON(matrices(ddp)), ADAMW(rest(ddp))]


def step(*before: Make, after: tuple[Make, ...] = (), optimizer: Any = ADAMW, **options: Any) -> Build:
    """Stages, then one update, then more stages."""

    def build(ddp: Any) -> list[Any]:
        overlapped = OverlappedOptimizer(optimizer(ddp.parameters()))
        stages = [*(make() for make in before), Step(overlapped, **options), *(make() for make in after)]
        chain(*stages).register(ddp)
        return [overlapped]

    return build


def reduce(*stages: Make) -> Build:
    """No update in the chain: the loop steps a plain optimizer."""

    def build(ddp: Any) -> list[Any]:
        chain(*(make() for make in stages)).register(ddp)
        return adamw(ddp)

    return build


def zero(*before: Make, zero: dict[str, Any] | None = None, **options: Any) -> Build:
    def build(ddp: Any) -> list[Any]:
        arguments = {"lr": 0.01, "weight_decay": 0.1, "fused": True, **(zero or {})}
        sharded = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **arguments)
        chain(*(make() for make in before), ZeroStep(sharded, **options)).register(ddp)
        return [sharded]

    return build


def two_steps(*before: Make, **options: Any) -> Build:
    def build(ddp: Any) -> list[Any]:
        both = [OverlappedOptimizer(optimizer) for optimizer in muon_and_adamw(ddp)]
        chain(*(make() for make in before), *(Step(one, **options) for one in both)).register(ddp)
        return both

    return build


def two_zeros(*before: Make, **options: Any) -> Build:
    def build(ddp: Any) -> list[Any]:
        muon = ZeroRedundancyOptimizer(matrices(ddp), torch.optim.Muon, lr=0.02, overlap_with_ddp=True)
        adamw = ZeroRedundancyOptimizer(
            rest(ddp), torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True, overlap_with_ddp=True
        )
        chain(*(make() for make in before), ZeroStep(muon, **options), ZeroStep(adamw, **options)).register(ddp)
        return [muon, adamw]

    return build


def zero_and_step(ddp: Any) -> list[Any]:
    muon = ZeroRedundancyOptimizer(matrices(ddp), torch.optim.Muon, lr=0.02, overlap_with_ddp=True)
    adamw = OverlappedOptimizer(ADAMW(rest(ddp)))
    chain(ZeroStep(muon), Step(adamw)).register(ddp)
    return [muon, adamw]


def local_sgd(**options: Any) -> Build:
    return lambda ddp: [LocalSGD(ddp, SGD(ddp.parameters()), period=2, start_step=2, **options)]


@declare("element")
class OnDefault(torch.optim.AdamW):
    """Launches on the default stream, whatever stream is current, as bitsandbytes' do."""

    __module__ = "bitsandbytes.optim"

    def step(self, closure: Any = None) -> Any:
        stream = default_stream(torch.device("cpu"))
        with contextlib.nullcontext() if (detector := active()) is None else detector.on_stream(stream):
            return super().step(closure)


def on_default(ddp: Any) -> list[Any]:
    return [OnDefault(ddp.parameters(), lr=0.01, weight_decay=0.1, fused=True)]


def on_default_in_backward(ddp: Any, **options: Any) -> list[Any]:
    optimizer = OverlappedOptimizer(on_default(ddp)[0])
    chain(AllReduce(), Step(optimizer, **options)).register(ddp)
    return [optimizer]


def on_default_sharded(ddp: Any) -> list[Any]:
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), OnDefault, lr=0.01, weight_decay=0.1, fused=True, overlap_with_ddp=True
    )
    chain(ZeroStep(zero)).register(ddp)
    return [zero]


def factors(**options: Any) -> Make:
    return lambda: PowerSGD(**{"rank": 1, "min_compression_rate": 1.0, **options})


def factors_that_end(ddp: Any) -> list[Any]:
    """A state of a small rank goes on with one at which nothing is compressed: residuals are sent as they are."""
    optimizer = OverlappedOptimizer(ADAMW(ddp.parameters()))
    reducer = PowerSGD(rank=99, min_compression_rate=2.0)
    chain(reducer, Step(optimizer)).register(ddp)
    named = ddp.module.named_parameters()
    residuals = {name: torch.full_like(one.detach(), 0.01) for name, one in named if one.ndim > 1}
    reducer.load_state_dict({**reducer.state_dict(), "residuals": residuals})
    return [optimizer]


def post_local() -> PostLocal:
    return PostLocal(PostLocalSGDState(None, dist.new_group([dist.get_rank()], use_local_synchronization=True), 2))


def hook(state: Any, bucket: Any) -> Any:
    """As a user writes it."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0].div_(dist.get_world_size()))


def routed() -> Any:
    return route({"*embedding*": AllReduce(), "*.weight": factors()(), "*": AllReduce()})


def noise() -> Any:
    return add_noise(torch.Generator().manual_seed(5), std=0.01)


def log() -> Log:
    return Log(lambda step, norms: None)


def failing() -> Callable[[Any], None]:
    def failing(bucket: Any) -> None:
        if bucket.step == 3 and bucket.index == 2:
            raise ValueError("broken on purpose")

    return failing


def clip_values(ddp: Any) -> None:
    torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.01)
