"""Every part of the library on streams, alone and with others."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from bucket_functions import centralize, clip_value, scale
from overlap import (
    AllGather,
    AllReduce,
    BFloat16,
    Cast,
    ClipGradNorm,
    Float8,
    Hierarchical,
    Int4,
    Int8,
    Quantize,
    SkipNonFinite,
    TopK,
    as_stage,
)

from . import loops
from .builds import (
    SGD,
    adamw,
    clip_values,
    factors,
    factors_that_end,
    failing,
    hook,
    local_sgd,
    log,
    muon_and_adamw,
    noise,
    on_default,
    on_default_in_backward,
    on_default_sharded,
    post_local,
    reduce,
    routed,
    step,
    two_steps,
    two_zeros,
    zero,
    zero_and_step,
)
from .model import Branches, Offloading, Unused
from .scenario import Build, Make, Scenario

__all__ = ["SCENARIOS", "TOPICS"]

OUTER = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)

EXACT = {"all-reduce": AllReduce, "all-gather": AllGather}
ROUNDING: dict[str, Make] = {
    "16 bits": lambda: Cast(BFloat16()),
    "factors": factors(),
    "alternating factors": factors(alternate=True),
    "factors in 8 bits": factors(wire=Int8()),
    "factors after two steps": factors(start_step=2, error_dtype=torch.bfloat16),
    "8 bits": lambda: Quantize(Int8()),
    "4 bits, feedback": lambda: Quantize(Int4(), error_feedback=True),
    "float8": lambda: Quantize(Float8()),
    "sparse, feedback": lambda: Quantize(TopK(0.1), error_feedback=True),
    "two levels": lambda: Hierarchical(outer=Quantize(Int4(), error_feedback=True), machine_size=1),
    "within a machine": lambda: Hierarchical(outer=AllReduce(), machine_size=2),
    "routes": routed,
    "after local SGD": post_local,
    "a hook": lambda: as_stage(hook),
}
# On a device factors are orthogonalized by another algorithm.
_OTHER_ON_HOST = ("factors", "routes")


def _with_each_reducer(build: Callable[[Make], Build]) -> dict[str, Scenario]:
    exact = {name: Scenario(build=build(make), plain=adamw) for name, make in EXACT.items()}
    return exact | {
        name: Scenario(build=build(make), as_on_host=not any(word in name for word in _OTHER_ON_HOST))
        for name, make in ROUNDING.items()
    }


# Once, before the first average.
_FIRST_ROUND = ("overlap/optim/local_sgd/outer.py:check_common",)
_STEPS = "overlap/optim/local_sgd/averager.py:_weight"
_POLL = ("overlap/join/participation.py:result",)
_SAVED = ("overlap/resume/state.py:_snapshot",)
# Where a registration compares the values of the model with rank 0's.
_REGISTERED = ("overlap/_torch/foreach.py:fingerprint",)
_SHARDED = (*_REGISTERED, "overlap/optim/zero/partition.py:check_same_on_all_ranks")
_WIRES = {"reduce_wire": Int4(), "gather_wire": Int8(), "error_feedback": True}
_BY_PARAMETER = {"partition": "parameter"}

_VIEWS = {"gradient_as_bucket_view": True}
_RELEASED = {"release_gradients": True}

_TOPICS: dict[str, dict[str, Scenario]] = {
    "no update": _with_each_reducer(reduce),
    "interleaved": _with_each_reducer(step),
    "sharded, in the next forward": _with_each_reducer(lambda make: zero(make, gather="forward")),
    "factors": {
        "factors that end": Scenario(build=factors_that_end),
    },
    "updates": {
        "deferred": Scenario(build=step(AllReduce, deferred=True), plain=adamw),
        "clipped": Scenario(build=step(AllReduce, clip_grad_norm=0.1), as_on_host=False),
        "scaled": Scenario(build=step(AllReduce, deferred=True), loop=loops.scales, plain=adamw),
        "on the default stream": Scenario(build=on_default_in_backward, plain=on_default),
        "on the default stream, sharded": Scenario(build=on_default_sharded, plain=on_default),
        "two updates": Scenario(build=two_steps(AllReduce), plain=muon_and_adamw),
        "two updates, deferred": Scenario(build=two_steps(AllReduce, deferred=True), plain=muon_and_adamw),
        "sharded": Scenario(build=zero(), plain=adamw),
        "sharded by parameter": Scenario(build=zero(zero=_BY_PARAMETER), plain=adamw),
        "sharded by parameter, in the next forward": Scenario(
            build=zero(zero=_BY_PARAMETER, gather="forward"), plain=adamw
        ),
        "sharded, deferred": Scenario(build=zero(deferred=True), plain=adamw),
        "sharded, clipped": Scenario(build=zero(clip_grad_norm=0.1), as_on_host=False),
        "sharded, in the next forward": Scenario(build=zero(gather="forward"), plain=adamw),
        "sharded, deferred, in the next forward": Scenario(build=zero(gather="forward", deferred=True), plain=adamw),
        "sharded, scaled": Scenario(build=zero(deferred=True), loop=loops.scales, plain=adamw),
        "sharded, wires": Scenario(build=zero(**_WIRES)),
        "sharded, wires, in the next forward": Scenario(build=zero(gather="forward", **_WIRES)),
        "sharded, 16 bits there and back": Scenario(build=zero(reduce_wire=BFloat16(), gather_wire=BFloat16())),
        "two sharded updates": Scenario(build=two_zeros(), plain=muon_and_adamw),
        "two sharded updates, in the next forward": Scenario(build=two_zeros(gather="forward"), plain=muon_and_adamw),
        "two sharded updates, deferred": Scenario(build=two_zeros(deferred=True), plain=muon_and_adamw),
        "one sharded, one not": Scenario(build=zero_and_step, plain=muon_and_adamw),
    },
    "transforms": {
        "clip the norm": Scenario(build=step(AllReduce, lambda: ClipGradNorm(0.1)), as_on_host=False),
        "clip values": Scenario(build=step(AllReduce, lambda: clip_value(0.01)), plain=adamw, edit=clip_values),
        "clip the norm, sharded": Scenario(build=zero(lambda: ClipGradNorm(0.1), gather="forward"), as_on_host=False),
        "log, skip": Scenario(build=step(AllReduce, log, SkipNonFinite), plain=adamw),
        "log, skip, sharded": Scenario(build=zero(log, SkipNonFinite), plain=adamw),
        "skip, wires, in the next forward": Scenario(build=zero(SkipNonFinite, gather="forward", **_WIRES)),
        "norms read": Scenario(
            build=step(AllReduce, lambda: ClipGradNorm(0.1), log, SkipNonFinite), loop=loops.logs, as_on_host=False
        ),
        "everything around": Scenario(
            build=step(lambda: scale(2.0), AllReduce, lambda: scale(0.5), lambda: centralize, noise, after=(log,))
        ),
    },
    "loops": {
        "views": Scenario(build=step(AllReduce), ddp={"gradient_as_bucket_view": True}, plain=adamw),
        "views, sharded": Scenario(build=zero(gather="forward"), ddp={"gradient_as_bucket_view": True}, plain=adamw),
        "views, factors": Scenario(build=step(factors()), ddp={"gradient_as_bucket_view": True}, as_on_host=False),
        "accumulates": Scenario(build=step(AllReduce, deferred=True), loop=loops.accumulates, plain=adamw),
        "accumulates, sharded": Scenario(build=zero(deferred=True), loop=loops.accumulates, plain=adamw),
        "static graph": Scenario(build=step(AllReduce, deferred=True), ddp={"static_graph": True}, plain=adamw),
        "unused": Scenario(
            build=step(AllReduce, deferred=True), model=Unused, ddp={"find_unused_parameters": True}, plain=adamw
        ),
        "unused, sharded": Scenario(
            build=zero(deferred=True),
            model=Unused,
            ddp={"find_unused_parameters": True},
            plain=adamw,
        ),
        "unused, sharded, in the next forward": Scenario(
            build=zero(deferred=True, gather="forward"),
            model=Unused,
            ddp={"find_unused_parameters": True},
            plain=adamw,
        ),
        "quantized collectives": Scenario(build=adamw, loop=loops.quantizes),
        "offload": Scenario(build=step(AllReduce), loop=loops.offloads, model=Offloading, plain=adamw),
        "offload, in flight": Scenario(build=step(AllReduce), model=Offloading, plain=adamw),
        "offload, dropped": Scenario(build=step(AllReduce), loop=loops.stops_halfway, model=Offloading, plain=adamw),
        "offload, sharded": Scenario(build=zero(gather="forward"), model=Offloading, plain=adamw),
    },
    "released gradients": {
        "released": Scenario(build=step(AllReduce, **_RELEASED), ddp=_VIEWS, plain=adamw),
        "released, 4 bits": Scenario(build=step(ROUNDING["4 bits, feedback"], **_RELEASED), ddp=_VIEWS),
        "released, factors": Scenario(build=step(factors(), **_RELEASED), ddp=_VIEWS, as_on_host=False),
        "released, skip": Scenario(build=step(AllReduce, log, SkipNonFinite, **_RELEASED), ddp=_VIEWS, plain=adamw),
        "released, on the default stream": Scenario(
            build=functools.partial(on_default_in_backward, **_RELEASED), ddp=_VIEWS, plain=on_default
        ),
        "released, on two streams": Scenario(
            build=step(AllReduce, **_RELEASED), model=Branches, ddp=_VIEWS, plain=adamw
        ),
        "released, two updates": Scenario(build=two_steps(AllReduce, **_RELEASED), ddp=_VIEWS, plain=muon_and_adamw),
        "released, sharded": Scenario(build=zero(**_RELEASED), ddp=_VIEWS, plain=adamw),
        "released, sharded, in the next forward": Scenario(
            build=zero(gather="forward", **_RELEASED), ddp=_VIEWS, plain=adamw
        ),
        "released, sharded, wires": Scenario(build=zero(**_WIRES, **_RELEASED), ddp=_VIEWS),
        "released, two sharded updates": Scenario(build=two_zeros(**_RELEASED), ddp=_VIEWS, plain=muon_and_adamw),
        "released, resumes": Scenario(
            build=step(AllReduce, **_RELEASED), loop=loops.resumes, ddp=_VIEWS, plain=adamw, host_syncs=_SAVED
        ),
        "released, removed": Scenario(
            build=step(AllReduce, optimizer=SGD, **_RELEASED),
            loop=loops.removes,
            ddp=_VIEWS,
            host_syncs=_REGISTERED,
        ),
        "released, joins": Scenario(
            build=step(AllReduce, **_RELEASED), loop=loops.joins_knowing, ddp=_VIEWS, plain=adamw
        ),
    },
    "failures and states": {
        "fails": Scenario(build=step(AllReduce, deferred=True), loop=loops.fails, plain=adamw),
        "fails in a stage": Scenario(build=step(AllReduce, failing, deferred=True), loop=loops.fails_in_a_stage),
        "fails in a stage, sharded": Scenario(
            build=zero(failing, gather="forward", deferred=True), loop=loops.fails_in_a_stage
        ),
        "fails, sharded": Scenario(build=zero(gather="forward", deferred=True), loop=loops.fails, plain=adamw),
        "resumes": Scenario(build=step(AllReduce), loop=loops.resumes, plain=adamw, host_syncs=_SAVED),
        "resumes, sharded": Scenario(build=zero(gather="forward"), loop=loops.resumes, plain=adamw, host_syncs=_SAVED),
        "resumes, factors": Scenario(build=step(factors()), loop=loops.resumes, as_on_host=False, host_syncs=_SAVED),
        "resumes, 4 bits": Scenario(build=step(ROUNDING["4 bits, feedback"]), loop=loops.resumes, host_syncs=_SAVED),
        "removed": Scenario(build=step(AllReduce, optimizer=SGD), loop=loops.removes, host_syncs=_REGISTERED),
        "removed, sharded": Scenario(build=zero(gather="forward"), loop=loops.removes, host_syncs=_SHARDED),
        "removed, 4 bits": Scenario(
            build=step(ROUNDING["4 bits, feedback"]), loop=loops.removes, host_syncs=_REGISTERED
        ),
    },
    "uneven inputs": {
        "joins": Scenario(build=step(AllReduce), loop=loops.joins, plain=adamw, host_syncs=_POLL),
        "joins, iterating": Scenario(build=step(AllReduce), loop=loops.joins_iterating, plain=adamw, host_syncs=_POLL),
        "joins, knowing": Scenario(build=step(AllReduce), loop=loops.joins_knowing, plain=adamw),
        "joins, sharded": Scenario(
            build=zero(gather="forward"), loop=loops.joins_iterating, plain=adamw, host_syncs=_POLL
        ),
        "joins, 4 bits": Scenario(build=step(ROUNDING["4 bits, feedback"]), loop=loops.joins_knowing),
        "joins, factors": Scenario(build=step(factors()), loop=loops.joins, as_on_host=False, host_syncs=_POLL),
        "joins, local": Scenario(build=local_sgd(overlap=True), loop=loops.joins, host_syncs=(*_POLL, _STEPS)),
    },
    "local SGD": {
        "local": Scenario(loop=loops.trains_long, build=local_sgd()),
        "local, outer": Scenario(loop=loops.trains_long, build=local_sgd(outer=OUTER), host_syncs=_FIRST_ROUND),
        "local, overlapped": Scenario(loop=loops.trains_long, build=local_sgd(overlap=True)),
        "local, fragments": Scenario(loop=loops.trains_long, build=local_sgd(overlap=True, fragments=2)),
        "local, fragments, outer": Scenario(
            loop=loops.trains_long, build=local_sgd(overlap=True, fragments=2, outer=OUTER), host_syncs=_FIRST_ROUND
        ),
        "local, 4 bits": Scenario(
            loop=loops.trains_long, build=local_sgd(wire=Int4(), error_feedback=True), host_syncs=_FIRST_ROUND
        ),
        "local, 4 bits, overlapped": Scenario(
            build=local_sgd(wire=Int4(), error_feedback=True, overlap=True), host_syncs=_FIRST_ROUND
        ),
        "local, sparse, outer": Scenario(
            build=local_sgd(wire=TopK(0.1), error_feedback=True, outer=OUTER), host_syncs=_FIRST_ROUND
        ),
    },
}

TOPICS: dict[str, dict[str, Scenario]] = {
    topic: {f"{name}, {topic}" if place < 3 else name: scenario for name, scenario in found.items()}
    for place, (topic, found) in enumerate(_TOPICS.items())
}
"""By topic; in the first three each reducer is there, with that update."""

SCENARIOS: dict[str, Scenario] = {name: one for found in TOPICS.values() for name, one in found.items()}
