"""The state of one rank: model, optimizer and stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap._checks import check_ddp
from overlap._torch.compiled import plain_name
from overlap._torch.ddp import registered_hook
from overlap.errors import ConfigurationError, TrainingLoopError
from overlap.hooks import Stage, StageHook
from overlap.hooks.adapters import HookStage, hook_name
from overlap.hooks.engine.registration import registration_of
from overlap.hooks.stage import walk
from overlap.optim import FunctionalOptimizer, LocalSGD, ZeroRedundancyOptimizer
from overlap.optim.lifecycle import UpdateLifecycle
from overlap.optim.phases import Event, Phase
from overlap.resume.optimizers import (
    check_optimizer_state,
    inner_optimizer,
    load_optimizer_state,
    optimizer_state,
)
from overlap.resume.snapshot import snapshot

__all__ = ["load_state_dict", "state_dict"]

_KEYS = {"version", "rank", "ranks", "model", "optimizer", "stages"}
_VERSION = 1
OneOptim = Optimizer | FunctionalOptimizer
Optim = OneOptim | Sequence[OneOptim] | None


def state_dict(ddp: DistributedDataParallel, optim: Optim = None) -> dict[str, Any]:
    """All that this rank needs to resume its run exactly: each rank saves its own.

    It holds the model, the optimizers (of a ``ZeroRedundancyOptimizer`` this rank's share; of a ``LocalSGD`` the round,
    the outer optimizer and a pending average), and what the registered stages remember, nested ones too: error
    feedback, factors, counters, generators, and the buckets that the next pass is to be reduced in. Gradients, learning
    rate schedulers, ``GradScaler``, the position in the data and PyTorch's own generators are not in it.

    It is a snapshot in CPU memory, of tensors and plain values: ``torch.load(..., weights_only=True)`` loads it.

    Args:
        ddp: the model.
        optim: the optimizer of the training loop, or a list of all where it has several; where ``None`` no optimizer is
            saved.

    Issues: nothing; waits for gathers and averages that are under way.

    Raises:
        TrainingLoopError: between backward and ``step()``, since gradients are not saved.
        ConfigurationError: the model is not in DDP, or has a hook or a state that cannot be saved; or a registered
            stage updates with an optimizer that is not given.
    """
    model = check_ddp(ddp)
    stage = _stage_of(model)
    _check_phase(stage)
    found = _optimizers(optim, stage, "state_dict")
    _wait(found)
    optimizers = [optimizer_state(one, _names(model)) for one in found]
    state = {
        "version": _VERSION,
        "rank": model.process_group.rank(),
        "ranks": model.process_group.size(),
        "model": _plain_names(model.module.state_dict()),
        "optimizer": None if not optimizers else optimizers[0] if len(optimizers) == 1 else optimizers,
        "stages": None if stage is None else {"classes": _classes(stage), "state": stage.state_dict()},
    }
    return {key: snapshot(value, f"state_dict()[{key!r}]") for key, value in state.items()}


@torch.no_grad()
def load_state_dict(ddp: DistributedDataParallel, optim: Optim, state: Mapping[str, Any]) -> None:
    """Load what :func:`state_dict` returned on this rank; call it on every rank, after stages are registered.

    Everything is compared by name before anything is changed. The optimizer's parameters may be in another order than
    in the run that was saved; a plain optimizer's state loads into an ``OverlappedOptimizer``, and the other way round.
    For another number of ranks see ``docs/resuming.md``.

    Args:
        ddp: the model, with the same stages registered as in the run that was saved.
        optim: its optimizer, or the list of them in the order in which they were saved, or ``None`` if none was.
        state: this rank's.

    Issues: nothing.

    Raises:
        ConfigurationError: the state is another rank's, another number of ranks', or another model's, optimizer's or
            chain's.
        TrainingLoopError: between backward and ``step()``, where the update was made in backward.
    """
    model = check_ddp(ddp)
    stage = _stage_of(model)
    found = _optimizers(optim, stage, "load_state_dict")
    _check_form(state)
    _check_place(model.process_group, state)
    here = model.module.state_dict()
    _check_model(_plain_names(here), state["model"])
    _check_stages(stage, state["stages"])
    saved = _saved_optimizers(state["optimizer"])
    if len(found) != len(saved):
        then = {0: "without an optimizer", 1: "with one optimizer"}.get(len(saved), f"with {len(saved)} optimizers")
        now = {0: "none", 1: "one"}.get(len(found), str(len(found)))
        raise ConfigurationError(f"the state was saved {then}, and load_state_dict was given {now}")
    for place, (one, of_one) in enumerate(zip(found, saved, strict=True)):
        try:
            check_optimizer_state(one, _names(model), of_one)
        except ConfigurationError as error:
            if len(found) > 1:
                error.add_note(f"of optimizer {place} of the list; give them in the order in which they were saved")
            raise
    for lifecycle in _lifecycles(stage):
        lifecycle.check(Event.LOAD)
    _wait(found)
    stages = None if stage is None else state["stages"]["state"]
    if stage is not None and not any(isinstance(one, LocalSGD) for one in found):
        stage.load_state_dict(stages or {})
    model.module.load_state_dict({name: state["model"][plain_name(name)] for name in here})
    for one, of_one in zip(found, saved, strict=True):
        load_optimizer_state(one, _names(model), of_one, stages)


def _optimizers(optim: Optim, stage: Stage | None, function: str) -> list[Any]:
    """The optimizers in ``optim``, which ``function`` was given.

    Raises:
        ConfigurationError: one is there twice, or ``stage`` updates a parameter with one that is not there.
    """
    given = [] if optim is None else list(optim) if isinstance(optim, (list, tuple)) else [optim]
    found = [inner_optimizer(one) for one in given]
    if len(set(map(id, found))) < len(found):
        raise ConfigurationError(f"{function} was given one optimizer twice; give each once")
    covered = {id(parameter) for one in found for group in one.param_groups for parameter in group["params"]}
    for update in [] if stage is None or not found else stage.sequence:
        if any(id(parameter) not in covered for parameter in update.updated):
            raise ConfigurationError(
                f"{update!r} is registered, and {function} was not given its optimizer, whose state would be lost: "
                f"give a list of all, {function}(ddp, [first, second])"
            )
    return found


def _saved_optimizers(state: Any) -> list[Any]:
    return [] if state is None else list(state) if isinstance(state, (list, tuple)) else [state]


def _wait(optimizers: Sequence[Any]) -> None:
    """Wait for gathers that are under way."""
    for one in optimizers:
        if isinstance(one, ZeroRedundancyOptimizer):
            one.wait()


def _stage_of(ddp: DistributedDataParallel) -> Stage | None:
    """The stage that is registered, by overlap or with DDP itself."""
    if (registration := registration_of(ddp)) is not None:
        for stage in walk(registration.stage):
            if isinstance(stage, HookStage):
                _check_hook(*stage.hook)
        return registration.stage
    hook, state = registered_hook(ddp) or (None, None)
    if isinstance(hook, StageHook):
        return hook.stage(state)
    _check_hook(hook, state)
    return None


def _check_hook(hook: object, state: object) -> None:
    """Raises: ConfigurationError: a hook that is not overlap's may remember something."""
    if state is not None and not isinstance(state, dist.ProcessGroup):
        raise ConfigurationError(
            f"the hook {hook_name(hook)} keeps its memory in a {type(state).__name__}, of which overlap knows nothing; "
            "use overlap's hook of that name, or a stage with a state_dict()"
        )


def _check_phase(stage: Stage | None) -> None:
    for lifecycle in _lifecycles(stage):
        if lifecycle.phase in (Phase.BACKWARD, Phase.REDUCED, Phase.APPLIED):
            raise TrainingLoopError(
                f"state_dict() between backward and {lifecycle.form.step}: gradients are not saved, so this step would "
                f"be lost; call {lifecycle.form.step} first"
            )


def _lifecycles(stage: Stage | None) -> list[UpdateLifecycle]:
    found = [getattr(one, "lifecycle", None) for one in ([] if stage is None else walk(stage))]
    return [lifecycle for lifecycle in found if isinstance(lifecycle, UpdateLifecycle)]


def _names(ddp: DistributedDataParallel) -> dict[Tensor, str]:
    return {parameter: plain_name(name) for name, parameter in ddp.module.named_parameters()}


def _plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    return {plain_name(name): value for name, value in state.items()}


def _classes(stage: Stage) -> list[str]:
    return [type(one).__name__ for one in walk(stage)]


def _check_form(state: object) -> None:
    if not isinstance(state, Mapping) or set(state) != _KEYS or state["version"] != _VERSION:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ConfigurationError(
            f"this is not what overlap.state_dict(ddp, optim) returns (version {_VERSION}): {found}"
        )


def _check_place(group: dist.ProcessGroup, state: Mapping[str, Any]) -> None:
    if (state["rank"], state["ranks"]) != (group.rank(), group.size()):
        raise ConfigurationError(
            f"the state was saved by rank {state['rank']} of {state['ranks']}, but this is rank {group.rank()} of "
            f"{group.size()}: each rank loads its own file; for another number of ranks see docs/resuming.md"
        )


def _check_model(here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    missing, added = sorted(set(here) - set(saved)), sorted(set(saved) - set(here))
    if missing or added:
        raise ConfigurationError(
            f"the state is another model's: it lacks {missing[:3] or 'nothing'}{', ...' if len(missing) > 3 else ''} "
            f"and adds {added[:3] or 'nothing'}{', ...' if len(added) > 3 else ''}"
        )
    for name, value in here.items():
        if isinstance(value, Tensor) and (value.shape, value.dtype) != (saved[name].shape, saved[name].dtype):
            raise ConfigurationError(
                f"the state is another model's: {name} is {tuple(saved[name].shape)} {saved[name].dtype} in it, and "
                f"{tuple(value.shape)} {value.dtype} here"
            )


def _check_stages(stage: Stage | None, saved: Mapping[str, Any] | None) -> None:
    here = None if stage is None else _classes(stage)
    then = None if saved is None else saved["classes"]
    if here != then:
        raise ConfigurationError(
            f"the state was saved with {_told(then)} registered, and here {_told(here)} is: register the same stages "
            "before load_state_dict"
        )


def _told(classes: list[str] | None) -> str:
    return "no stage" if classes is None else " > ".join(classes)
