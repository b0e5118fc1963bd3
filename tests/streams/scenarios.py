"""Every part of the library on streams: chains, the loops that they are in, and the same training without streams."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from bucket_functions import Ones
from overlap import (
    AllReduce,
    ClipGradNorm,
    Int4,
    LocalSGD,
    Log,
    OverlappedOptimizer,
    PowerSGD,
    Quantize,
    SkipNonFinite,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    as_hook,
    as_stage,
    chain,
    route,
)
from overlap.hooks.route import Route

from . import loops
from .loops import Loop
from .model import Branches, Deep, Net, Unused, matrices, rest

Build = Callable[[Any], list[Any]]
"""Registers a chain on a DDP model and returns the optimizers of the loop."""
Make = Callable[[], Any]
"""Makes a stage: each rank, and each play of a scenario, has its own."""

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True)
MUON = functools.partial(torch.optim.Muon, lr=0.02)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A chain, a loop and a model, and what must come of them."""

    build: Build
    loop: Loop = loops.trains
    model: type[Net] = Net
    ddp: dict[str, Any] = field(default_factory=dict)
    """Options of ``DistributedDataParallel``."""
    plain: Build | None = None
    """Optimizers with which plain DDP gives the same parameters, in every bit."""
    as_on_host: bool = True
    """Whether the same chain without streams gives the same parameters, in every bit; read without ``plain``."""


def adamw(ddp: Any) -> list[Any]:
    return [ADAMW(ddp.parameters())]


def muon_and_adamw(ddp: Any) -> list[Any]:
    return [MUON(matrices(ddp)), ADAMW(rest(ddp))]


def step(*before: Make, optimizers: Build = adamw, **options: Any) -> Build:
    """Stages, then the updates."""

    def build(ddp: Any) -> list[Any]:
        overlapped = [OverlappedOptimizer(optimizer) for optimizer in optimizers(ddp)]
        chain(*(make() for make in before), *(Step(one, **options) for one in overlapped)).register(ddp)
        return overlapped

    return build


def reduce(make: Make) -> Build:
    """No update in the chain: the loop steps a plain optimizer."""

    def build(ddp: Any) -> list[Any]:
        chain(make()).register(ddp)
        return adamw(ddp)

    return build


def zero(*before: Make, partition: str = "element", **options: Any) -> Build:
    def build(ddp: Any) -> list[Any]:
        sharded = ZeroRedundancyOptimizer(
            ddp.parameters(), torch.optim.AdamW, partition=partition, overlap_with_ddp=True, **ADAMW.keywords
        )
        chain(*(make() for make in before), ZeroStep(sharded, **options)).register(ddp)
        return [sharded]

    return build


def local_sgd(**options: Any) -> Build:
    def build(ddp: Any) -> list[Any]:
        sgd = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        return [LocalSGD(ddp, sgd, period=2, start_step=2, **options)]

    return build


def _hooked(ddp: Any) -> list[Any]:
    ddp.register_comm_hook(None, as_hook(AllReduce()))
    return adamw(ddp)


def _outer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def _factors() -> PowerSGD:
    return PowerSGD(rank=1, min_compression_rate=1.0)


def _four_bits() -> Quantize:
    return Quantize(Int4(), error_feedback=True)


def _routed() -> Route:
    return route({"*.bias": AllReduce(), "*": _four_bits()})


def _hook(state: Any, bucket: Any) -> Any:
    """As a user writes it."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0].div_(dist.get_world_size()))


def _failing() -> Callable[[Any], None]:
    def failing(bucket: Any) -> None:
        if bucket.step == 2 and bucket.index == 2:
            raise ValueError("broken on purpose")

    return failing


_VIEWS = {"gradient_as_bucket_view": True}
_UNUSED: dict[str, Any] = {"model": Unused, "ddp": {"find_unused_parameters": True}}

SCENARIOS: dict[str, Scenario] = {
    # Reducers. On a device factors are orthogonalized by another algorithm.
    "all-reduce, no update": Scenario(build=reduce(AllReduce), plain=adamw),
    "a hook of DDP's own": Scenario(build=_hooked, plain=adamw),
    "a hook, no update": Scenario(build=reduce(lambda: as_stage(_hook))),
    "all-reduce, interleaved": Scenario(build=step(AllReduce), plain=adamw),
    "4 bits, feedback, interleaved": Scenario(build=step(_four_bits)),
    "factors, interleaved": Scenario(build=step(_factors), as_on_host=False),
    "routed, packed": Scenario(build=step(_routed), loop=loops.trains_long, model=Deep),
    # Updates.
    "two updates, deferred": Scenario(
        build=step(AllReduce, optimizers=muon_and_adamw, deferred=True), plain=muon_and_adamw
    ),
    "sharded by parameter": Scenario(build=zero(partition="parameter"), plain=adamw),
    "sharded, deferred": Scenario(build=zero(deferred=True), plain=adamw),
    "sharded, in the next forward": Scenario(build=zero(gather="forward"), plain=adamw),
    "sharded, deferred, in the next forward": Scenario(build=zero(gather="forward", deferred=True), plain=adamw),
    # Transforms, and verdicts that the host does not read.
    "log, skip": Scenario(build=step(AllReduce, lambda: Log(lambda step, norms: None), SkipNonFinite), plain=adamw),
    "clip the norm, sharded": Scenario(build=zero(lambda: ClipGradNorm(0.1), gather="forward"), as_on_host=False),
    "overflows, sharded": Scenario(build=zero(deferred=True, gather="forward"), loop=loops.overflows, plain=adamw),
    "count": Scenario(build=step(Ones, AllReduce), plain=adamw),
    "count, factors, sharded": Scenario(build=zero(Ones, _factors), as_on_host=False),
    # Loops.
    "unused, sharded, in the next forward": Scenario(
        build=zero(deferred=True, gather="forward"), plain=adamw, **_UNUSED
    ),
    "released": Scenario(build=step(AllReduce, release_gradients=True), model=Deep, ddp=_VIEWS, plain=adamw),
    "released, on two streams": Scenario(
        build=step(AllReduce, release_gradients=True), model=Branches, ddp=_VIEWS, plain=adamw
    ),
    "fails in backward": Scenario(build=step(AllReduce, deferred=True), loop=loops.fails_in_backward, ddp=_VIEWS),
    "fails in a stage": Scenario(build=step(AllReduce, _failing, deferred=True), loop=loops.fails_in_a_stage),
    "joins": Scenario(build=step(AllReduce), loop=loops.joins, plain=adamw),
    "joins, 4 bits": Scenario(build=step(_four_bits), loop=loops.joins),
    "local": Scenario(loop=loops.trains_long, build=local_sgd()),
    "local, overlapped": Scenario(loop=loops.trains_long, build=local_sgd(overlap=True)),
    "local, fragments, outer": Scenario(
        loop=loops.trains_long, build=local_sgd(overlap=True, fragments=2, outer=_outer)
    ),
}
