"""The forms of update that every loop is played with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from overlap import (
    AllReduce,
    ClipGradNorm,
    DivideByCount,
    LocalSGD,
    OptimizerHookState,
    OverlappedOptimizer,
    ReduceScatter,
    Step,
    ZeroRedundancyOptimizer,
    ZeroStep,
    allreduce_hook,
    chain,
    hook_then_optimizer,
    route,
)

from .run import Run, Stepless


@dataclass(frozen=True, kw_only=True)
class Form:
    """A way to make the update: ``build(run, ddp, params)`` registers it and returns what the loop holds."""

    name: str
    made: str
    """How a user writes it."""
    build: Callable[[Run, Any, Any], Any]
    state: Callable[[Any], Any] = lambda optimizer: optimizer.state_dict()
    """The whole state as the plain optimizer's."""
    is_settled: bool = True
    """Whether parameters are final after ``step()``, so that reading them disturbs nothing."""
    has_whole_state: bool = True
    """Whether every rank has the whole state without asking the others."""
    ddp: Mapping[str, Any] = field(default_factory=dict)
    """Options of DDP that it needs."""
    topics: frozenset[str] | None = None
    """The topics whose loops it plays; ``None``: all."""
    is_inline: bool = False
    """Whether stages run on autograd's thread, as those of models as small as the corpus has them do where nobody asks
    otherwise."""


def _replicated(*, clips: bool = False, **options: Any) -> Callable[[Run, Any, Any], Any]:
    def build(run: Run, ddp: Any, params: Any) -> Any:
        optimizer = OverlappedOptimizer(run.plain_optimizer(params))
        clip = [ClipGradNorm(CLIPS_AT)] if clips else []
        run.keep(chain(AllReduce(), *clip, Step(optimizer, **options)).register(ddp))
        return optimizer

    return build


def _look(bucket: Any) -> None:
    """A transform that changes nothing."""


def _chained(run: Run, ddp: Any, params: Any) -> Any:
    optimizer = OverlappedOptimizer(run.plain_optimizer(params))
    reducer = route({_is_matrix: AllReduce(), "*": AllReduce()}) if _has_both(ddp) else AllReduce()
    run.keep(chain(_look, reducer, _look, Step(optimizer), _look).register(ddp))
    return optimizer


def _is_matrix(name: str, parameter: Any) -> bool:
    return bool(parameter.ndim > 1)


def _has_both(ddp: Any) -> bool:
    return any(_is_matrix(name, parameter) for name, parameter in ddp.named_parameters() if parameter.requires_grad)


def _sharded_chained(run: Run, ddp: Any, params: Any) -> Any:
    zero = _zero(run, params, overlap_with_ddp=True)
    run.keep(chain(ReduceScatter(zero), _look, ZeroStep(zero), _look).register(ddp))
    return zero


def _automatic(run: Run, ddp: Any, params: Any) -> Any:
    optimizer = run.plain_optimizer(params)
    stage = Step(optimizer)
    run.keep(chain(AllReduce(), stage).register(ddp))
    return Stepless(optimizer, stage)


def _hook(run: Run, ddp: Any, params: Any) -> Any:
    optimizer = run.plain_optimizer(params)
    ddp.register_comm_hook(None, hook_then_optimizer(allreduce_hook, OptimizerHookState(optimizer)))
    return Stepless(optimizer)


def _zero(run: Run, params: Any, **options: Any) -> ZeroRedundancyOptimizer:
    cls, defaults = run.optimizer_class()
    return run.prepared(ZeroRedundancyOptimizer(params, cls, **options, **defaults))


def _sharded(zero_options: Mapping[str, Any] | None = None, **options: Any) -> Callable[[Run, Any, Any], Any]:
    def build(run: Run, ddp: Any, params: Any) -> Any:
        zero = _zero(run, params, overlap_with_ddp=True, **(zero_options or {}))
        run.keep(chain(ZeroStep(zero, **options)).register(ddp))
        return zero

    return build


def _local(run: Run, ddp: Any, params: Any) -> Any:
    local = LocalSGD(ddp, run.plain_optimizer(params), period=4, start_step=10**6)
    run.keep(local)
    return local


def _local_state(local: Any) -> Any:
    return {key: value for key, value in local.state_dict().items() if key != "local_sgd"}


def _sharded_clipped(run: Run, ddp: Any, params: Any) -> Any:
    zero = _zero(run, params, overlap_with_ddp=True)
    run.keep(chain(AllReduce(), ClipGradNorm(CLIPS_AT), ZeroStep(zero)).register(ddp))
    return zero


def _counted(**options: Any) -> Callable[[Run, Any, Any], Any]:
    def build(run: Run, ddp: Any, params: Any) -> Any:
        run.by_count, optimizer = DivideByCount(), OverlappedOptimizer(run.plain_optimizer(params))
        run.keep(chain(run.by_count, AllReduce(), Step(optimizer, **options)).register(ddp))
        return optimizer

    return build


def _counted_sharded(run: Run, ddp: Any, params: Any) -> Any:
    run.by_count, zero = DivideByCount(), _zero(run, params, overlap_with_ddp=True)
    run.keep(chain(run.by_count, ZeroStep(zero)).register(ddp))
    return zero


def _consolidated(zero: Any) -> Any:
    """On rank 0; compared there."""
    zero.consolidate_state_dict(to=0)
    return zero.state_dict() if dist.get_rank() == 0 else None


_VIEWS = {"gradient_as_bucket_view": True}
CLIPS_AT = 0.05
"""The largest norm in the forms that clip in the chain."""
_CLIPPING = frozenset({"clipping"})
_COUNTED = frozenset({"counted"})
"""A topic whose loops other forms cannot play."""
# Of forms that differ from another one only in when memory is there, or in the thread that stages run on.
_SOME = frozenset({"plain", "accumulation", "gradients", "schedules", "resuming", "joined"})
_ZERO: dict[str, Any] = {"state": _consolidated, "has_whole_state": False}

PLAIN = Form(name="plain", made="DDP, then `o.step()`", build=lambda run, ddp, params: run.plain_optimizer(params))

FORMS: tuple[Form, ...] = (
    Form(name="interleaved", made="`Step(OverlappedOptimizer(o))`", build=_replicated()),
    Form(name="chained", made="`Step` among transforms, behind `route({...})`", build=_chained),
    Form(name="deferred", made="`Step(OverlappedOptimizer(o), deferred=True)`", build=_replicated(deferred=True)),
    Form(
        name="released",
        made="`Step(OverlappedOptimizer(o), release_gradients=True)`",
        build=_replicated(release_gradients=True),
        ddp=_VIEWS,
        topics=_SOME,
    ),
    Form(name="automatic", made="`Step(o)`", build=_automatic),
    Form(name="hook", made="`hook_then_optimizer(allreduce_hook, OptimizerHookState(o))`", build=_hook),
    Form(name="zero", made="`ZeroStep(zero)`", build=_sharded(), **_ZERO),
    Form(
        name="zero chained",
        made="`ReduceScatter(zero), ZeroStep(zero)` among transforms",
        build=_sharded_chained,
        **_ZERO,
    ),
    Form(
        name="zero forward",
        made='`ZeroStep(zero, gather="forward")`',
        build=_sharded(gather="forward"),
        is_settled=False,
        **_ZERO,
    ),
    Form(
        name="zero released",
        made="`ZeroStep(zero, release_gradients=True)`",
        build=_sharded(release_gradients=True),
        ddp=_VIEWS,
        topics=_SOME,
        **_ZERO,
    ),
    Form(
        name="zero inline",
        made="`ZeroStep(zero)` on autograd's thread, as for any model as small as these",
        build=_sharded(),
        is_inline=True,
        topics=_SOME,
        **_ZERO,
    ),
    Form(name="zero deferred", made="`ZeroStep(zero, deferred=True)`", build=_sharded(deferred=True), **_ZERO),
    Form(
        name="zero parameter",
        made='`ZeroStep(zero)`, where `zero` has `partition="parameter"`',
        build=_sharded(zero_options={"partition": "parameter"}),
        **_ZERO,
    ),
    Form(
        name="zero alone",
        made="`ZeroRedundancyOptimizer` without a stage",
        build=lambda run, ddp, params: _zero(run, params),
        **_ZERO,
    ),
    Form(
        name="clipped",
        made="`AllReduce(), ClipGradNorm(c), Step(OverlappedOptimizer(o))`",
        build=_replicated(clips=True),
        topics=_CLIPPING,
    ),
    Form(
        name="zero clipped",
        made="`AllReduce(), ClipGradNorm(c), ZeroStep(zero)`",
        build=_sharded_clipped,
        topics=_CLIPPING,
        **_ZERO,
    ),
    Form(
        name="counted",
        made="`DivideByCount(), AllReduce(), Step(OverlappedOptimizer(o))`",
        build=_counted(),
        topics=_COUNTED,
    ),
    Form(
        name="counted deferred",
        made="`DivideByCount(), AllReduce(), Step(OverlappedOptimizer(o), deferred=True)`",
        build=_counted(deferred=True),
        topics=_COUNTED,
    ),
    Form(
        name="counted zero",
        made="`DivideByCount(), ZeroStep(zero)`",
        build=_counted_sharded,
        topics=_COUNTED,
        **_ZERO,
    ),
    Form(name="local", made="`LocalSGD` before its `start_step`", build=_local, state=_local_state),
)

ALL = tuple(form.name for form in FORMS)


def forms_of(topic: str) -> tuple[Form, ...]:
    """The forms that play the loops of ``topic``."""
    return tuple(form for form in FORMS if topic in (form.topics or {topic} - _COUNTED))


AUTOMATIC = ("automatic", "hook")
"""Backward does everything, and the loop calls no ``step()``."""
INTERLEAVED = ("interleaved", "chained", "released")
ZERO_INTERLEAVED = ("zero", "zero chained", "zero forward", "zero released", "zero inline", "zero parameter")
STEPPED = (*INTERLEAVED, *ZERO_INTERLEAVED)
"""The update is made in backward, and the loop calls ``step()``."""
CLIPS_ITSELF = ("clipped", "zero clipped")
"""The library clips, and the loop does not."""
IN_BACKWARD = (*STEPPED, *AUTOMATIC)
"""The update is made in backward."""
SHARDED = tuple(name for name in ALL if name.startswith("zero"))
STAGED = tuple(name for name in SHARDED if name != "zero alone")
"""A ``ZeroStep`` makes the sharded update."""
