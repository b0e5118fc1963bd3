"""Every part of the library on streams, alone and with others."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from harness.streams import active
from overlap import (
    AddNoise,
    AllGather,
    AllReduce,
    BFloat16,
    Cast,
    Centralize,
    ClipGradNorm,
    ClipValue,
    Float8,
    Hierarchical,
    Int4,
    Int8,
    LocalSGD,
    Log,
    OverlappedOptimizer,
    PowerSGD,
    Quantize,
    Scale,
    SkipNonFinite,
    Step,
    TopK,
    ZeroRedundancyOptimizer,
    ZeroStep,
    as_stage,
    chain,
    route,
)
from overlap._torch.device import default_stream
from overlap.hooks import PostLocal, PostLocalSGDState

from . import loops
from .loops import Loop
from .model import Branches, Net, Offloading, Unused, matrices, rest

__all__ = ["SCENARIOS", "TOPICS", "Scenario"]

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
MUON = functools.partial(torch.optim.Muon, lr=0.02)
OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)

Build = Callable[[Any], list[Any]]
Make = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """``build(ddp)`` registers a chain and returns the optimizers of the loop."""

    build: Build
    loop: Loop = loops.trains
    model: type[Net] = Net
    ddp: dict[str, Any] = field(default_factory=dict)
    """Options of ``DistributedDataParallel``."""
    plain: Build | None = None
    """Optimizers with which plain DDP gives the same parameters, in every bit."""
    edit: Callable[[Any], Any] = lambda ddp: None
    """What plain DDP does between backward and step."""
    as_on_host: bool = True
    """Whether the same chain without streams gives the same parameters, in every bit; looked at without ``plain``."""
    host_syncs: tuple[str, ...] = ()
    """Where the host waits for the device, as in :meth:`harness.streams.Report.check`."""


def _adamw(ddp: Any) -> list[Any]:
    return [ADAMW(ddp.parameters())]


def _muon_and_adamw(ddp: Any) -> list[Any]:
    return [MUON(matrices(ddp)), ADAMW(rest(ddp))]


def _step(*before: Make, after: tuple[Make, ...] = (), optimizer: Any = ADAMW, **options: Any) -> Build:
    """Stages, then one update, then more stages."""

    def build(ddp: Any) -> list[Any]:
        overlapped = OverlappedOptimizer(optimizer(ddp.parameters()))
        stages = [*(make() for make in before), Step(overlapped, **options), *(make() for make in after)]
        chain(*stages).register(ddp)
        return [overlapped]

    return build


def _reduce(*stages: Make) -> Build:
    """No update in the chain: the loop steps a plain optimizer."""

    def build(ddp: Any) -> list[Any]:
        chain(*(make() for make in stages)).register(ddp)
        return _adamw(ddp)

    return build


def _zero(*before: Make, zero: dict[str, Any] | None = None, **options: Any) -> Build:
    def build(ddp: Any) -> list[Any]:
        arguments = {"lr": 0.01, "weight_decay": 0.1, "fused": True, **(zero or {})}
        sharded = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **arguments)
        chain(*(make() for make in before), ZeroStep(sharded, **options)).register(ddp)
        return [sharded]

    return build


def _two_steps(*before: Make, **options: Any) -> Build:
    def build(ddp: Any) -> list[Any]:
        both = [OverlappedOptimizer(optimizer) for optimizer in _muon_and_adamw(ddp)]
        chain(*(make() for make in before), *(Step(one, **options) for one in both)).register(ddp)
        return both

    return build


def _two_zeros(*before: Make, **options: Any) -> Build:
    def build(ddp: Any) -> list[Any]:
        muon = ZeroRedundancyOptimizer(matrices(ddp), torch.optim.Muon, lr=0.02, overlap_with_ddp=True)
        adamw = ZeroRedundancyOptimizer(
            rest(ddp), torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True, overlap_with_ddp=True
        )
        chain(*(make() for make in before), ZeroStep(muon, **options), ZeroStep(adamw, **options)).register(ddp)
        return [muon, adamw]

    return build


def _zero_and_step(ddp: Any) -> list[Any]:
    muon = ZeroRedundancyOptimizer(matrices(ddp), torch.optim.Muon, lr=0.02, overlap_with_ddp=True)
    adamw = OverlappedOptimizer(ADAMW(rest(ddp)))
    chain(ZeroStep(muon), Step(adamw)).register(ddp)
    return [muon, adamw]


def _local(**options: Any) -> Build:
    return lambda ddp: [LocalSGD(ddp, SGD(ddp.parameters()), period=2, start_step=2, **options)]


class _OnDefault(torch.optim.AdamW):
    """Launches on the default stream, whatever stream is current, as some optimizers outside of PyTorch do."""

    def step(self, closure: Any = None) -> Any:
        stream = default_stream(torch.device("cpu"))
        with contextlib.nullcontext() if (detector := active()) is None else detector.on_stream(stream):
            return super().step(closure)


def _on_default(ddp: Any) -> list[Any]:
    return [_OnDefault(ddp.parameters(), lr=0.01, weight_decay=0.1, fused=True)]


def _on_default_in_backward(ddp: Any, **options: Any) -> list[Any]:
    optimizer = OverlappedOptimizer(_on_default(ddp)[0])
    chain(AllReduce(), Step(optimizer, **options)).register(ddp)
    return [optimizer]


def _on_default_sharded(ddp: Any) -> list[Any]:
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), _OnDefault, lr=0.01, weight_decay=0.1, fused=True, overlap_with_ddp=True
    )
    chain(ZeroStep(zero)).register(ddp)
    return [zero]


def _factors(**options: Any) -> Make:
    return lambda: PowerSGD(**{"rank": 1, "min_compression_rate": 1.0, **options})


def _factors_with_momentum(ddp: Any) -> list[Any]:
    optimizer = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.05))
    reducer = PowerSGD(rank=1, min_compression_rate=1.0, momentum=0.9, optimizer=optimizer)
    chain(reducer, Step(optimizer)).register(ddp)
    return [optimizer]


def _post_local() -> PostLocal:
    return PostLocal(PostLocalSGDState(None, dist.new_group([dist.get_rank()], use_local_synchronization=True), 2))


def _hook(state: Any, bucket: Any) -> Any:
    """As a user writes it."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0].div_(dist.get_world_size()))


def _routed() -> Any:
    return route({"*embedding*": AllReduce(), "*.weight": _factors()(), "*": AllReduce()})


def _noise() -> AddNoise:
    return AddNoise(torch.Generator().manual_seed(5), std=0.01)


def _log() -> Log:
    return Log(lambda step, norms: None)


def _failing() -> Callable[[Any], None]:
    def failing(bucket: Any) -> None:
        if bucket.step == 3 and bucket.index == 2:
            raise ValueError("broken on purpose")

    return failing


def _clip_values(ddp: Any) -> None:
    torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.01)


EXACT = {"all-reduce": AllReduce, "all-gather": AllGather}
ROUNDING: dict[str, Make] = {
    "16 bits": lambda: Cast(BFloat16()),
    "factors": _factors(),
    "alternating factors": _factors(alternate=True),
    "factors in 8 bits": _factors(wire=Int8()),
    "factors after two steps": _factors(start_step=2, error_dtype=torch.bfloat16),
    "8 bits": lambda: Quantize(Int8()),
    "4 bits, feedback": lambda: Quantize(Int4(), error_feedback=True),
    "float8": lambda: Quantize(Float8()),
    "sparse, feedback": lambda: Quantize(TopK(0.1), error_feedback=True),
    "two levels": lambda: Hierarchical(outer=Quantize(Int4(), error_feedback=True), machine_size=1),
    "within a machine": lambda: Hierarchical(outer=AllReduce(), machine_size=2),
    "routes": _routed,
    "after local SGD": _post_local,
    "a hook": lambda: as_stage(_hook),
}
# On a device factors are orthogonalized by another algorithm.
_OTHER_ON_HOST = ("factors", "routes")


def _with_each_reducer(build: Callable[[Make], Build]) -> dict[str, Scenario]:
    exact = {name: Scenario(build=build(make), plain=_adamw) for name, make in EXACT.items()}
    return exact | {
        name: Scenario(build=build(make), as_on_host=not any(word in name for word in _OTHER_ON_HOST))
        for name, make in ROUNDING.items()
    }


# Once, before the first average.
_FIRST_ROUND = ("overlap/optim/local_sgd/anchors.py:check_common",)
_STEPS = "overlap/optim/local_sgd/synchronizer.py:_weight_by_steps"
_STATE = "overlap/optim/local_sgd/model_tensors.py:check_others"
_POLL = ("overlap/join/participation.py:result",)
_SAVED = ("overlap/resume/snapshot.py:snapshot",)
# Where a registration compares the values of the model with rank 0's.
_REGISTERED = ("overlap/hooks/engine/same_registration.py:_fingerprint",)
_SHARDED = (*_REGISTERED, "overlap/optim/zero/parameter_groups.py:check_same_on_all_ranks")
_WIRES = {"reduce_wire": Int4(), "gather_wire": Int8(), "error_feedback": True}
_BY_PARAMETER = {"partition": "parameter"}

_VIEWS = {"gradient_as_bucket_view": True}
_RELEASED = {"release_gradients": True}

_TOPICS: dict[str, dict[str, Scenario]] = {
    "no update": _with_each_reducer(_reduce),
    "interleaved": _with_each_reducer(_step),
    "sharded, in the next forward": _with_each_reducer(lambda make: _zero(make, gather="forward")),
    "factors": {
        "factors that end": Scenario(
            build=_step(_factors(rank=lambda step: 1 if step < 3 else 99, min_compression_rate=2.0)),
            as_on_host=False,
            host_syncs=("overlap/hooks/powersgd/ranks.py",),
        ),
        "factors with momentum": Scenario(build=_factors_with_momentum, as_on_host=False),
    },
    "updates": {
        "deferred": Scenario(build=_step(AllReduce, deferred=True), plain=_adamw),
        "clipped": Scenario(build=_step(AllReduce, clip_grad_norm=0.1), as_on_host=False),
        "scaled": Scenario(build=_step(AllReduce, deferred=True), loop=loops.scales, plain=_adamw),
        "on the default stream": Scenario(build=_on_default_in_backward, plain=_on_default),
        "on the default stream, sharded": Scenario(build=_on_default_sharded, plain=_on_default),
        "two updates": Scenario(build=_two_steps(AllReduce), plain=_muon_and_adamw),
        "two updates, deferred": Scenario(build=_two_steps(AllReduce, deferred=True), plain=_muon_and_adamw),
        "sharded": Scenario(build=_zero(), plain=_adamw),
        "sharded by parameter": Scenario(build=_zero(zero=_BY_PARAMETER), plain=_adamw),
        "sharded by parameter, in the next forward": Scenario(
            build=_zero(zero=_BY_PARAMETER, gather="forward"), plain=_adamw
        ),
        "sharded, deferred": Scenario(build=_zero(deferred=True), plain=_adamw),
        "sharded, clipped": Scenario(build=_zero(clip_grad_norm=0.1), as_on_host=False),
        "sharded, in the next forward": Scenario(build=_zero(gather="forward"), plain=_adamw),
        "sharded, deferred, in the next forward": Scenario(build=_zero(gather="forward", deferred=True), plain=_adamw),
        "sharded, scaled": Scenario(build=_zero(deferred=True), loop=loops.scales, plain=_adamw),
        "sharded, wires": Scenario(build=_zero(**_WIRES)),
        "sharded, wires, in the next forward": Scenario(build=_zero(gather="forward", **_WIRES)),
        "sharded, 16 bits there and back": Scenario(build=_zero(reduce_wire=BFloat16(), gather_wire=BFloat16())),
        "two sharded updates": Scenario(build=_two_zeros(), plain=_muon_and_adamw),
        "two sharded updates, in the next forward": Scenario(build=_two_zeros(gather="forward"), plain=_muon_and_adamw),
        "two sharded updates, deferred": Scenario(build=_two_zeros(deferred=True), plain=_muon_and_adamw),
        "one sharded, one not": Scenario(build=_zero_and_step, plain=_muon_and_adamw),
    },
    "transforms": {
        "clip the norm": Scenario(build=_step(AllReduce, lambda: ClipGradNorm(0.1)), as_on_host=False),
        "clip values": Scenario(build=_step(AllReduce, lambda: ClipValue(0.01)), plain=_adamw, edit=_clip_values),
        "clip the norm, sharded": Scenario(build=_zero(lambda: ClipGradNorm(0.1), gather="forward"), as_on_host=False),
        "log, skip": Scenario(build=_step(AllReduce, _log, SkipNonFinite), plain=_adamw),
        "log, skip, sharded": Scenario(build=_zero(_log, SkipNonFinite), plain=_adamw),
        "skip, wires, in the next forward": Scenario(build=_zero(SkipNonFinite, gather="forward", **_WIRES)),
        "norms read": Scenario(
            build=_step(AllReduce, lambda: ClipGradNorm(0.1), _log, SkipNonFinite), loop=loops.logs, as_on_host=False
        ),
        "norms written": Scenario(
            build=_step(AllReduce, Log),
            loop=loops.logs,
            plain=_adamw,
            host_syncs=("overlap/hooks/late_reads.py:read",),
        ),
        "everything around": Scenario(
            build=_step(lambda: Scale(2.0), AllReduce, lambda: Scale(0.5), Centralize, _noise, after=(_log,))
        ),
    },
    "loops": {
        "views": Scenario(build=_step(AllReduce), ddp={"gradient_as_bucket_view": True}, plain=_adamw),
        "views, sharded": Scenario(build=_zero(gather="forward"), ddp={"gradient_as_bucket_view": True}, plain=_adamw),
        "views, factors": Scenario(build=_step(_factors()), ddp={"gradient_as_bucket_view": True}, as_on_host=False),
        "accumulates": Scenario(build=_step(AllReduce, deferred=True), loop=loops.accumulates, plain=_adamw),
        "accumulates, sharded": Scenario(build=_zero(deferred=True), loop=loops.accumulates, plain=_adamw),
        "static graph": Scenario(build=_step(AllReduce, deferred=True), ddp={"static_graph": True}, plain=_adamw),
        "unused": Scenario(
            build=_step(AllReduce, deferred=True), model=Unused, ddp={"find_unused_parameters": True}, plain=_adamw
        ),
        "unused, sharded": Scenario(
            build=_zero(deferred=True),
            model=Unused,
            ddp={"find_unused_parameters": True},
            plain=_adamw,
        ),
        "unused, sharded, in the next forward": Scenario(
            build=_zero(deferred=True, gather="forward"),
            model=Unused,
            ddp={"find_unused_parameters": True},
            plain=_adamw,
        ),
        "quantized collectives": Scenario(
            build=_adamw, loop=loops.quantizes, host_syncs=("overlap/quantized/algorithms.py:_agreed",)
        ),
        "offload": Scenario(build=_step(AllReduce), loop=loops.offloads, model=Offloading, plain=_adamw),
        "offload, in flight": Scenario(build=_step(AllReduce), model=Offloading, plain=_adamw),
        "offload, dropped": Scenario(build=_step(AllReduce), loop=loops.stops_halfway, model=Offloading, plain=_adamw),
        "offload, sharded": Scenario(build=_zero(gather="forward"), model=Offloading, plain=_adamw),
    },
    "released gradients": {
        "released": Scenario(build=_step(AllReduce, **_RELEASED), ddp=_VIEWS, plain=_adamw),
        "released, 4 bits": Scenario(build=_step(ROUNDING["4 bits, feedback"], **_RELEASED), ddp=_VIEWS),
        "released, factors": Scenario(build=_step(_factors(), **_RELEASED), ddp=_VIEWS, as_on_host=False),
        "released, skip": Scenario(build=_step(AllReduce, _log, SkipNonFinite, **_RELEASED), ddp=_VIEWS, plain=_adamw),
        "released, on the default stream": Scenario(
            build=functools.partial(_on_default_in_backward, **_RELEASED), ddp=_VIEWS, plain=_on_default
        ),
        "released, on two streams": Scenario(
            build=_step(AllReduce, **_RELEASED), model=Branches, ddp=_VIEWS, plain=_adamw
        ),
        "released, two updates": Scenario(build=_two_steps(AllReduce, **_RELEASED), ddp=_VIEWS, plain=_muon_and_adamw),
        "released, sharded": Scenario(build=_zero(**_RELEASED), ddp=_VIEWS, plain=_adamw),
        "released, sharded, in the next forward": Scenario(
            build=_zero(gather="forward", **_RELEASED), ddp=_VIEWS, plain=_adamw
        ),
        "released, sharded, wires": Scenario(build=_zero(**_WIRES, **_RELEASED), ddp=_VIEWS),
        "released, two sharded updates": Scenario(build=_two_zeros(**_RELEASED), ddp=_VIEWS, plain=_muon_and_adamw),
        "released, resumes": Scenario(
            build=_step(AllReduce, **_RELEASED), loop=loops.resumes, ddp=_VIEWS, plain=_adamw, host_syncs=_SAVED
        ),
        "released, removed": Scenario(
            build=_step(AllReduce, optimizer=SGD, **_RELEASED),
            loop=loops.removes,
            ddp=_VIEWS,
            host_syncs=_REGISTERED,
        ),
        "released, joins": Scenario(
            build=_step(AllReduce, **_RELEASED), loop=loops.joins_knowing, ddp=_VIEWS, plain=_adamw
        ),
    },
    "failures and states": {
        "fails": Scenario(build=_step(AllReduce, deferred=True), loop=loops.fails, plain=_adamw),
        "fails in a stage": Scenario(build=_step(AllReduce, _failing, deferred=True), loop=loops.fails_in_a_stage),
        "fails in a stage, sharded": Scenario(
            build=_zero(_failing, gather="forward", deferred=True), loop=loops.fails_in_a_stage
        ),
        "fails, sharded": Scenario(build=_zero(gather="forward", deferred=True), loop=loops.fails, plain=_adamw),
        "resumes": Scenario(build=_step(AllReduce), loop=loops.resumes, plain=_adamw, host_syncs=_SAVED),
        "resumes, sharded": Scenario(
            build=_zero(gather="forward"), loop=loops.resumes, plain=_adamw, host_syncs=_SAVED
        ),
        "resumes, factors": Scenario(build=_step(_factors()), loop=loops.resumes, as_on_host=False, host_syncs=_SAVED),
        "resumes, 4 bits": Scenario(build=_step(ROUNDING["4 bits, feedback"]), loop=loops.resumes, host_syncs=_SAVED),
        "resumes, momentum": Scenario(
            build=_factors_with_momentum, loop=loops.resumes, as_on_host=False, host_syncs=_SAVED
        ),
        "removed": Scenario(build=_step(AllReduce, optimizer=SGD), loop=loops.removes, host_syncs=_REGISTERED),
        "removed, sharded": Scenario(build=_zero(gather="forward"), loop=loops.removes, host_syncs=_SHARDED),
        "removed, 4 bits": Scenario(
            build=_step(ROUNDING["4 bits, feedback"]), loop=loops.removes, host_syncs=_REGISTERED
        ),
    },
    "uneven inputs": {
        "joins": Scenario(build=_step(AllReduce), loop=loops.joins, plain=_adamw, host_syncs=_POLL),
        "joins, iterating": Scenario(
            build=_step(AllReduce), loop=loops.joins_iterating, plain=_adamw, host_syncs=_POLL
        ),
        "joins, knowing": Scenario(build=_step(AllReduce), loop=loops.joins_knowing, plain=_adamw),
        "joins, sharded": Scenario(
            build=_zero(gather="forward"), loop=loops.joins_iterating, plain=_adamw, host_syncs=_POLL
        ),
        "joins, 4 bits": Scenario(build=_step(ROUNDING["4 bits, feedback"]), loop=loops.joins_knowing),
        "joins, factors": Scenario(build=_step(_factors()), loop=loops.joins, as_on_host=False, host_syncs=_POLL),
        "joins, local": Scenario(build=_local(overlap=True), loop=loops.joins, host_syncs=(*_POLL, _STEPS)),
    },
    "local SGD": {
        "local": Scenario(loop=loops.trains_long, build=_local()),
        "local, outer": Scenario(loop=loops.trains_long, build=_local(outer=OUTER), host_syncs=_FIRST_ROUND),
        "local, overlapped": Scenario(loop=loops.trains_long, build=_local(overlap=True)),
        "local, fragments": Scenario(loop=loops.trains_long, build=_local(overlap=True, fragments=2)),
        "local, fragments, outer": Scenario(
            loop=loops.trains_long, build=_local(overlap=True, fragments=2, outer=OUTER), host_syncs=_FIRST_ROUND
        ),
        "local, 4 bits": Scenario(
            loop=loops.trains_long, build=_local(wire=Int4(), error_feedback=True), host_syncs=_FIRST_ROUND
        ),
        "local, 4 bits, overlapped": Scenario(
            build=_local(wire=Int4(), error_feedback=True, overlap=True), host_syncs=_FIRST_ROUND
        ),
        "local, sparse, outer": Scenario(
            build=_local(wire=TopK(0.1), error_feedback=True, outer=OUTER), host_syncs=_FIRST_ROUND
        ),
        "local, state averaged": Scenario(
            loop=loops.trains_long, build=_local(optimizer_state="average"), host_syncs=(_STATE,)
        ),
        "local, in 16 bits": Scenario(loop=loops.trains_long, build=_local(average_dtype=torch.bfloat16, overlap=True)),
    },
}

TOPICS: dict[str, dict[str, Scenario]] = {
    topic: {f"{name}, {topic}" if place < 3 else name: scenario for name, scenario in found.items()}
    for place, (topic, found) in enumerate(_TOPICS.items())
}
"""By topic; in the first three each reducer is there, with that update."""

SCENARIOS: dict[str, Scenario] = {name: one for found in TOPICS.values() for name, one in found.items()}
