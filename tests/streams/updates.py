"""Updates on streams: optimizers that launch on the default stream, verdicts that the host does not read."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from bucket_functions import add_noise, clip_value, scale
from overlap import (
    AllReduce,
    ClipGradNorm,
    Int8,
    LocalSGD,
    Log,
    OverlappedOptimizer,
    SkipNonFinite,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    chain,
    declare,
)
from overlap._torch.device import default_stream, has_streams, new_stream, on_stream

from . import loops
from .loops import Game
from .model import Unused, matrices, rest
from .scenario import Build, Make, Scenario

__all__ = ["UPDATES", "OnDefaultStream"]

CPU = torch.device("cpu")
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True)


@declare("element")
class OnDefaultStream(Optimizer):
    """As bitsandbytes: new state is filled on the current stream, and used on the default one."""

    __module__ = "bitsandbytes.optim"

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        stream = default_stream(CPU)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                with nullcontext() if stream is None else on_stream(stream):
                    state["momentum"].mul_(0.9).add_(parameter.grad)
                    parameter.add_(state["momentum"], alpha=-group["lr"])


def _on_its_own_stream(game: Game) -> None:
    """The whole loop, as in ``with torch.cuda.stream(stream):``."""
    if not has_streams(CPU):
        loops.trains(game)
        return
    stream, default = new_stream(CPU), default_stream(CPU)
    stream.wait_stream(default)
    with on_stream(stream):
        loops.trains(game)
        game.settle()
    default.wait_stream(stream)


def _overflows(game: Game) -> None:
    """With `GradScaler`; the second loss is infinite on one rank, and the step is left out on both."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for number in range(4):
        loss = game.loss()
        if number == 1 and game.rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        for optimizer in game.optimizers:
            if game.is_plain or number % 2:
                scaler.unscale_(optimizer)
        if game.is_plain:
            game.edit(game.ddp)
        for optimizer in game.optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()


def _edits(game: Game) -> None:
    """The loop scales gradients by hand where each rank has them whole, and clips them."""
    (optimizer,) = game.optimizers
    clip = getattr(optimizer, "clip_grad_norm_", functools.partial(clip_grad_norm_, list(game.ddp.parameters())))
    for number in range(4):
        game.loss().backward()
        for parameter in game.ddp.parameters():
            parameter.grad.mul_(0.5)
        if number % 2:
            clip(0.1)
        game.update()


def _clips(game: Game) -> None:
    """The loop clips the parts that each rank has."""
    for number in range(4):
        game.loss().backward()
        if number % 2:
            game.optimizers[0].clip_grad_norm_(0.1)
        game.update()


def _step(*stages: Make, cls: Any = ADAMW, **options: Any) -> Build:
    def build(ddp: Any) -> list[Any]:
        optimizer = OverlappedOptimizer(cls(ddp.parameters()))
        chain(AllReduce(), *(make() for make in stages), Step(optimizer, **options)).register(ddp)
        return [optimizer]

    return build


def _automatic(cls: Any) -> Build:
    def build(ddp: Any) -> list[Any]:
        chain(AllReduce(), Step(cls(ddp.parameters()), deferred=True)).register(ddp)
        return []

    return build


def _zero(*stages: Make, cls: Any = None, arguments: dict[str, Any] | None = None, **options: Any) -> Build:
    def build(ddp: Any) -> list[Any]:
        given = {"lr": 0.01, "weight_decay": 0.1, "fused": True} if cls is None else {}
        zero = ZeroRedundancyOptimizer(ddp.parameters(), cls or torch.optim.AdamW, **given, **(arguments or {}))
        chain(*(make() for make in stages), ZeroStep(zero, **options)).register(ddp)
        return [zero]

    return build


def _both(ddp: Any) -> list[Any]:
    one, other = (
        OverlappedOptimizer(OnDefaultStream(matrices(ddp))),
        ZeroRedundancyOptimizer(rest(ddp), OnDefaultStream),
    )
    chain(AllReduce(), Step(one), ZeroStep(other)).register(ddp)
    return [one, other]


def _local(ddp: Any) -> list[Any]:
    inner = torch.optim.SGD(ddp.parameters(), lr=0.05)
    return [LocalSGD(ddp, inner, period=1, start_step=0, outer=OnDefaultStream, overlap=True)]


def _plain(ddp: Any) -> list[Any]:
    return [OnDefaultStream(ddp.parameters())]


def _adamw(ddp: Any) -> list[Any]:
    return [ADAMW(ddp.parameters())]


_FORMS: dict[str, Build] = {
    "interleaved": _step(cls=OnDefaultStream),
    "deferred": _step(cls=OnDefaultStream, deferred=True),
    "deferred in backward": _automatic(OnDefaultStream),
    "sharded": _zero(cls=OnDefaultStream),
    "sharded by parameter": _zero(cls=OnDefaultStream, arguments={"partition": "parameter"}),
    "sharded, deferred": _zero(cls=OnDefaultStream, deferred=True),
    "sharded, automatic": _zero(cls=OnDefaultStream, deferred=True, automatic=True),
    "sharded, in the next forward": _zero(cls=OnDefaultStream, gather="forward"),
    "two updates": _both,
}
_TRANSFORMS: list[Callable[[], Any]] = [
    SkipNonFinite,
    lambda: ClipGradNorm(0.1),
    lambda: clip_value(0.01),
    lambda: scale(0.5),
    lambda: add_noise(torch.Generator().manual_seed(5), std=0.01),
    lambda: Log(lambda step, norms: None),
]
# Before the first average the ranks compare what they have.
_ONCE = ("overlap/optim/local_sgd/outer.py:check_common",)
_UNUSED: dict[str, Any] = {"model": Unused, "ddp": {"find_unused_parameters": True}}

UPDATES: dict[str, Scenario] = {
    **{f"default stream, {name}": Scenario(build=build, plain=_plain) for name, build in _FORMS.items()},
    **{
        f"default stream, {name}, loop on its own": Scenario(build=build, plain=_plain, loop=_on_its_own_stream)
        for name, build in _FORMS.items()
    },
    "default stream, outer": Scenario(build=_local, host_syncs=_ONCE),
    "default stream, outer, loop on its own": Scenario(build=_local, loop=_on_its_own_stream, host_syncs=_ONCE),
    "all transforms, interleaved": Scenario(build=_step(*_TRANSFORMS), as_on_host=False),
    "all transforms, deferred": Scenario(build=_step(*_TRANSFORMS, deferred=True), as_on_host=False),
    "all transforms, sharded": Scenario(build=_zero(*_TRANSFORMS), as_on_host=False),
    "all transforms, sharded, deferred": Scenario(
        build=_zero(*_TRANSFORMS, deferred=True, gather="forward"), as_on_host=False
    ),
    "overflows": Scenario(build=_step(deferred=True), loop=_overflows, plain=_adamw),
    "overflows, clipped": Scenario(build=_step(clip_grad_norm=1e6), loop=_overflows, plain=_adamw),
    "overflows, sharded": Scenario(build=_zero(deferred=True), loop=_overflows, plain=_adamw),
    "overflows, sharded, clipped": Scenario(
        build=_zero(clip_grad_norm=1e6, gather="forward"), loop=_overflows, plain=_adamw
    ),
    "overflows, sharded, wires": Scenario(
        build=_zero(deferred=True, reduce_wire=Int8()), loop=_overflows, as_on_host=False
    ),
    "edits": Scenario(build=_step(deferred=True), loop=_edits, as_on_host=False),
    "edits, sharded": Scenario(build=_zero(AllReduce, deferred=True), loop=_edits, as_on_host=False),
    "clips, sharded": Scenario(build=_zero(deferred=True), loop=_clips, as_on_host=False),
    "unused, clipped": Scenario(build=_step(clip_grad_norm=1e6), plain=_adamw, **_UNUSED),
    "unused, sharded, clipped": Scenario(build=_zero(clip_grad_norm=1e6), plain=_adamw, **_UNUSED),
}
