"""Every kind of chain: each reducer with each form of update, and what has a shape of its own."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import overlap
from bucket_functions import add_noise, scale
from overlap import (
    AllGather,
    AllReduce,
    Cast,
    ClipGradNorm,
    Float8,
    Hierarchical,
    Int4,
    Int8,
    LocalSGD,
    OverlappedOptimizer,
    PowerSGD,
    Quantize,
    SkipNonFinite,
    Stage,
    Step,
    TopK,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
    checkpoint_wrapper,
    offload_wrapper,
    route,
)

__all__ = ["CHAINS", "Chain"]

Build = Callable[[DistributedDataParallel], Sequence[Any]]
Wrap = Callable[[nn.Module], nn.Module]


def _as_it_is(module: nn.Module) -> nn.Module:
    return module


@dataclass(frozen=True, kw_only=True)
class Chain:
    """One chain, and what it is compared with."""

    name: str
    build: Build
    """Registers it, and returns the optimizers of the loop."""
    by_hand: Build | None = None
    """The same training with the update after backward; ``None`` where there is no such thing."""
    tolerance: float = 0.0
    """Of the largest difference to that, as a part of the largest parameter: for what is summed in another order."""
    equal_every: int = 1
    """Steps from one in which ranks have equal parameters to the next; 0 where they never need to."""
    layer: Wrap = _as_it_is
    """What each layer of the model is wrapped in."""
    ddp_options: dict[str, Any] = field(default_factory=dict)
    has_unused: bool = False
    """Whether a branch of the model is left out in every other step."""
    join: Literal["", "known", "unknown"] = ""
    """Whether ranks have different numbers of batches, and whether their loaders know."""

    def __str__(self) -> str:
        return self.name


def _adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, **(options or {"fused": True}))


def _plain(ddp: DistributedDataParallel, **options: Any) -> Sequence[Any]:
    return [_adamw(ddp.parameters(), **options)]


def _reduced(make: Callable[[], Stage]) -> Build:
    """The reducer alone, and PyTorch's loop."""

    def build(ddp: DistributedDataParallel) -> Sequence[Any]:
        chain(make()).register(ddp)
        return _plain(ddp)

    return build


def _stepped(*before: Callable[[], Stage], adamw: dict[str, Any] | None = None, **options: Any) -> Build:
    def build(ddp: DistributedDataParallel) -> Sequence[Any]:
        optimizer = OverlappedOptimizer(_adamw(ddp.parameters(), **(adamw or {})))
        chain(*(make() for make in before), Step(optimizer, **options)).register(ddp)
        return [optimizer]

    return build


def _sharded(*before: Callable[[], Stage], partition: str = "element", **options: Any) -> Build:
    def build(ddp: DistributedDataParallel) -> Sequence[Any]:
        zero = _zero(ddp, overlap_with_ddp=True, partition=partition)
        chain(*(make() for make in before), ZeroStep(zero, **options)).register(ddp)
        return [] if options.get("automatic") else [zero]

    return build


def _without_stage(ddp: DistributedDataParallel) -> Sequence[Any]:
    return [_zero(ddp)]


def _zero(ddp: DistributedDataParallel, **options: Any) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(
        ddp.parameters(), torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True, **options
    )


def _automatic(ddp: DistributedDataParallel) -> Sequence[Any]:
    """A plain optimizer, whose update every backward makes."""
    chain(AllReduce(), Step(_adamw(ddp.parameters()), deferred=True)).register(ddp)
    return []


def _hook_then_optimizer(ddp: DistributedDataParallel) -> Sequence[Any]:
    state = overlap.OptimizerHookState(_adamw(ddp.parameters()))
    overlap.register(ddp, overlap.hook_then_optimizer(overlap.allreduce_hook, state))
    return []


def _local(**options: Any) -> Build:
    def build(ddp: DistributedDataParallel) -> Sequence[Any]:
        sgd = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        return [LocalSGD(ddp, sgd, period=2, start_step=1, **options)]

    return build


def _outer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def _muon_and_adamw(ddp: DistributedDataParallel) -> list[tuple[Any, list[Tensor]]]:
    matrices = [p for name, p in ddp.named_parameters() if p.ndim == 2 and "embedding" not in name]
    rest = [p for name, p in ddp.named_parameters() if p.ndim != 2 or "embedding" in name]
    return [(torch.optim.Muon, matrices), (torch.optim.AdamW, rest)]


def _two_by_hand(ddp: DistributedDataParallel) -> Sequence[Any]:
    return [kind(parameters, lr=0.01) for kind, parameters in _muon_and_adamw(ddp)]


def _two_steps(ddp: DistributedDataParallel) -> Sequence[Any]:
    both = [OverlappedOptimizer(kind(parameters, lr=0.01)) for kind, parameters in _muon_and_adamw(ddp)]
    chain(AllReduce(), *map(Step, both)).register(ddp)
    return both


def _two_zeros(ddp: DistributedDataParallel, **options: Any) -> Sequence[Any]:
    both = [
        ZeroRedundancyOptimizer(parameters, kind, overlap_with_ddp=True, lr=0.01)
        for kind, parameters in _muon_and_adamw(ddp)
    ]
    chain(*(ZeroStep(zero, **options) for zero in both)).register(ddp)
    return both


def _factors(**options: Any) -> Stage:
    return PowerSGD(rank=2, min_compression_rate=1, **options)


def _routed() -> Stage:
    return route({"*embedding*": AllReduce(), "*.weight": _factors(), "*": AllReduce()})


def _there_and_back() -> list[Callable[[], Any]]:
    return [lambda: scale(2.0), AllReduce, lambda: scale(0.5)]


def _noisy(ddp: DistributedDataParallel) -> Sequence[Any]:
    device = next(ddp.parameters()).device
    return _stepped(AllReduce, lambda: add_noise(torch.Generator(device).manual_seed(5), std=0.01))(ddp)


REDUCERS: dict[str, Callable[[], Stage]] = {
    "AllReduce": AllReduce,
    "AllGather": AllGather,
    "Cast": lambda: Cast(torch.bfloat16, AllReduce()),
    "Int8": lambda: Quantize(Int8()),
    "Int4 with feedback": lambda: Quantize(Int4(), error_feedback=True),
    "Float8": lambda: Quantize(Float8()),
    "TopK with feedback": lambda: Quantize(TopK(0.1), error_feedback=True),
    "PowerSGD": _factors,
    "PowerSGD in Int8": functools.partial(_factors, wire=Int8()),
    "route": _routed,
    "Hierarchical": lambda: Hierarchical(outer=Quantize(Int8()), machine_size=1),
}
# Two ranks' gradients are summed and halved, as plain DDP does.
EXACT_REDUCERS = ("AllReduce", "AllGather")
UPDATES: dict[str, Callable[..., Build]] = {
    "Step": _stepped,
    "Step, deferred": functools.partial(_stepped, deferred=True),
    "ZeroStep": _sharded,
    "ZeroStep, gather in forward": functools.partial(_sharded, gather="forward"),
}
_FEW_BITS: dict[str, Any] = {"reduce_wire": Int4(), "gather_wire": Int8(), "error_feedback": True}
_STEP = Chain(name="AllReduce, Step", build=_stepped(AllReduce), by_hand=_plain)
_ZERO = Chain(name="ZeroStep", build=_sharded(), by_hand=_plain)
_IN_FORWARD = Chain(name="ZeroStep, gather in forward", build=_sharded(gather="forward"), by_hand=_plain)
_ZERO_DEFERRED = Chain(name="ZeroStep, deferred", build=_sharded(deferred=True), by_hand=_plain)
_LOCAL = Chain(name="LocalSGD", build=_local(), equal_every=2)


def _crossed() -> list[Chain]:
    return [
        Chain(
            name=f"{reducer}, {update}",
            build=UPDATES[update](make),
            by_hand=_plain if reducer in EXACT_REDUCERS else _reduced(make),
        )
        for (reducer, make), update in itertools.product(REDUCERS.items(), UPDATES)
    ]


def _alone() -> list[Chain]:
    """Updates with no reducer before them, or made in other ways."""
    return [
        _ZERO,
        _IN_FORWARD,
        _ZERO_DEFERRED,
        Chain(
            name="ZeroStep, deferred, gather in forward",
            build=_sharded(deferred=True, gather="forward"),
            by_hand=_plain,
        ),
        Chain(name="ZeroStep, whole parameters", build=_sharded(partition="parameter"), by_hand=_plain),
        Chain(name="ZeroStep, automatic", build=_sharded(automatic=True), by_hand=_plain),
        Chain(name="ZeroStep, automatic, deferred", build=_sharded(automatic=True, deferred=True), by_hand=_plain),
        Chain(name="ZeroRedundancyOptimizer without a stage", build=_without_stage, by_hand=_plain),
        Chain(name="ZeroStep, few bits", build=_sharded(**_FEW_BITS)),
        Chain(name="ZeroStep, few bits, gather in forward", build=_sharded(gather="forward", **_FEW_BITS)),
        Chain(name="Step, automatic", build=_automatic, by_hand=_plain),
        Chain(name="hook_then_optimizer", build=_hook_then_optimizer, by_hand=_plain),
        *(
            Chain(
                name=f"Step, {name}",
                build=_stepped(AllReduce, adamw=adamw),
                by_hand=functools.partial(_plain, **adamw),
            )
            for name, adamw in {"foreach": {"foreach": True}, "for-loop": {"foreach": False}}.items()
        ),
        Chain(name="two Steps", build=_two_steps, by_hand=_two_by_hand),
        Chain(name="two ZeroSteps", build=_two_zeros, by_hand=_two_by_hand),
        Chain(
            name="two ZeroSteps, gather in forward",
            build=functools.partial(_two_zeros, gather="forward"),
            by_hand=_two_by_hand,
        ),
    ]


def _transformed() -> list[Chain]:
    """The norm is far below 1000, so that clipping changes nothing but by rounding, if that."""
    return [
        Chain(name="ClipGradNorm, Step", build=_stepped(AllReduce, lambda: ClipGradNorm(1e3)), by_hand=_plain),
        Chain(name="ClipGradNorm, ZeroStep", build=_sharded(lambda: ClipGradNorm(1e3)), by_hand=_plain, tolerance=1e-6),
        Chain(name="Step that clips", build=_stepped(AllReduce, clip_grad_norm=1e3), by_hand=_plain),
        Chain(name="SkipNonFinite, Step", build=_stepped(AllReduce, SkipNonFinite), by_hand=_plain),
        Chain(name="SkipNonFinite, ZeroStep", build=_sharded(SkipNonFinite), by_hand=_plain),
        Chain(name="scale around AllReduce, Step", build=_stepped(*_there_and_back()), by_hand=_plain),
        Chain(name="noise, Step", build=_noisy),
    ]


def _averaged() -> list[Chain]:
    return [
        _LOCAL,
        Chain(name="LocalSGD, overlapped", build=_local(overlap=True), equal_every=0),
        Chain(name="LocalSGD, few bits", build=_local(wire=Int4(), error_feedback=True), equal_every=2),
        Chain(name="LocalSGD, outer", build=_local(outer=_outer), equal_every=2),
        Chain(
            name="LocalSGD, outer, overlapped, few bits",
            build=_local(outer=_outer, overlap=True, wire=Int4(), error_feedback=True),
            equal_every=0,
        ),
    ]


def _situated() -> list[Chain]:
    """The same few chains where a model, DDP or the loop is special."""
    few = (_STEP, _ZERO, _IN_FORWARD)
    return [
        *(replace(one, name=f"{one}, offloaded", layer=offload_wrapper) for one in few),
        *(replace(one, name=f"{one}, checkpointed", layer=checkpoint_wrapper) for one in few),
        *(
            replace(one, name=f"{one}, gradients as bucket views", ddp_options={"gradient_as_bucket_view": True})
            for one in few
        ),
        *(
            replace(one, name=f"{name}, unused", ddp_options={"find_unused_parameters": True}, has_unused=True)
            for name, one in {
                "Step, deferred": replace(_STEP, build=_stepped(AllReduce, deferred=True)),
                "ZeroStep, deferred": _ZERO_DEFERRED,
            }.items()
        ),
        *(replace(one, name=f"{one}, Join", by_hand=None, join="known") for one in (*few, _LOCAL)),
        *(replace(one, name=f"{one}, Join, lengths unknown", by_hand=None, join="unknown") for one in few),
    ]


CHAINS: dict[str, Chain] = {
    one.name: one for one in (*_crossed(), *_alone(), *_transformed(), *_averaged(), *_situated())
}
"""All of them by name, the most used ones first."""
