"""The state of one rank: model, optimizer and stages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
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
from overlap.optim.optimizer import OptimizerProxy
from overlap.optim.phases import Event, Phase
from overlap.optim.zero.checkpoint import check_part, load_part
from overlap.optim.zero.packed_state import load_packed
from overlap.resume.reshard import check_parameters, class_of, in_order, labels_of, order_of, redistribute

__all__ = ["load_state_dict", "rank_parts", "stage_of", "state_dict", "state_of_rank"]

OneOptim = Optimizer | FunctionalOptimizer
Optim = OneOptim | Sequence[OneOptim] | None
Names = Mapping[Tensor, str]

_VERSION = 1
_KEYS = {"version", "rank", "ranks", "model", "optimizer", "stages"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def state_dict(ddp: DistributedDataParallel, optim: Optim = None) -> dict[str, Any]:
    """All that this rank needs to resume its run exactly: each rank saves its own.

    It holds the model, the optimizers (of a ``ZeroRedundancyOptimizer`` this rank's share; of a ``LocalSGD`` the round,
    the outer optimizer and a pending average), and the state of the registered stages, nested ones included: error
    feedback, factors, counters and generators. Gradients, learning rate schedulers, ``GradScaler``, the position in the
    data and PyTorch's own generators are not in it.

    It is a snapshot in CPU memory, of tensors and plain values: ``torch.load(..., weights_only=True)`` loads it.

    Args:
        ddp: the model.
        optim: the optimizer of the training loop, or a list of all where it has several; where ``None`` no optimizer is
            saved.

    Communication: none; waits for gathers and averages that are under way.

    Raises:
        TrainingLoopError: between backward and ``step()``, since gradients are not saved.
        ConfigurationError: the model is not in DDP, or has a hook or a state that cannot be saved; or a registered
            stage updates with an optimizer that is not given.

    >>> optim = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))
    >>> chain(PowerSGD(rank=1), Step(optim)).register(ddp)
    <chain(PowerSGD(rank=1), Step(SGD, interleaved)) registered>
    >>> loss_fn(ddp(x), y).backward()
    >>> optim.step()
    >>> state = overlap.state_dict(ddp, optim)
    >>> sorted(state)
    ['model', 'optimizer', 'rank', 'ranks', 'stages', 'version']
    """
    return rank_parts(ddp, optim)


def rank_parts(ddp: DistributedDataParallel, optim: Optim = None, *, omit: Collection[str] = ()) -> dict[str, Any]:
    """What :func:`state_dict` returns, without the parts in ``omit``, of which no copy is made."""
    model = check_ddp(ddp)
    stage = stage_of(model)
    _check_phase(stage)
    found = _optimizers(optim, stage, "state_dict")
    _wait(found)

    def of_optimizers() -> Any:
        states = [_optimizer_state(one, _names(model)) for one in found]
        return None if not states else states[0] if len(states) == 1 else states

    parts: dict[str, Callable[[], Any]] = {
        "version": lambda: _VERSION,
        "rank": model.process_group.rank,
        "ranks": model.process_group.size,
        "model": lambda: _plain_names(model.module.state_dict()),
        "optimizer": of_optimizers,
        "stages": lambda: None if stage is None else {"classes": _classes_of(stage), "state": stage.state_dict()},
    }
    return {key: _snapshot(part(), f"state_dict()[{key!r}]") for key, part in parts.items() if key not in omit}


@torch.no_grad()
def load_state_dict(
    ddp: DistributedDataParallel, optim: Optim, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]
) -> None:
    """Load what :func:`state_dict` returned on this rank; call it on every rank, after stages are registered.

    Given what it returned on all ranks, as a list, it loads this rank's; or, if the number of ranks has changed, this
    rank's part as described in ``docs/resuming.md``.

    Everything is compared by name before anything is changed. The optimizer's parameters may be in another order than
    in the run that was saved; a plain optimizer's state loads into an ``OverlappedOptimizer``, and the other way round.

    Args:
        ddp: the model, with the same stages registered as in the run that was saved.
        optim: its optimizer, or the list of them in the order in which they were saved, or ``None`` if none was.
        state: this rank's, or the list of those of all ranks.

    Communication: none.

    Raises:
        ConfigurationError: the state is another rank's, another number of ranks', or another model's, optimizer's or
            chain's.
        TrainingLoopError: between backward and ``step()``, where the update was made in backward.

    >>> optim = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))
    >>> registration = chain(PowerSGD(rank=1), Step(optim)).register(ddp)
    >>> loss_fn(ddp(x), y).backward()
    >>> optim.step()
    >>> state = overlap.state_dict(ddp, optim)
    >>> overlap.load_state_dict(ddp, optim, state)  # in a new process, after the same registration
    """
    model = check_ddp(ddp)
    stage = stage_of(model)
    found = _optimizers(optim, stage, "load_state_dict")
    if isinstance(state, Sequence):
        for one in state:
            _check_form(one)
        state = state_of_rank(model, optim, state)
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
            _check_optimizer_state(one, _names(model), of_one)
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
        _load_optimizer_state(one, _names(model), of_one, stages)


def state_of_rank(ddp: DistributedDataParallel, optim: Optim, states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """This rank's of the states of all ranks, whatever their number was; some of the parts may be missing."""
    model = check_ddp(ddp)
    group, stage, by_rank = model.process_group, stage_of(model), in_order(states)
    if len(by_rank) == group.size():
        return by_rank[group.rank()]
    optimizers = _optimizers(optim, stage, "load_state_dict")
    if "stages" in by_rank[0]:
        _check_stages(stage, by_rank[0]["stages"])
    return redistribute(
        by_rank, rank=group.rank(), ranks=group.size(), stage=stage, optimizers=optimizers, names=_names(model)
    )


def _optimizers(optim: Optim, stage: Stage | None, function: str) -> list[Any]:
    """The optimizers in ``optim``, which ``function`` was given.

    Raises:
        ConfigurationError: one is there twice, or ``stage`` updates a parameter with one that is not there.
    """
    given = [] if optim is None else list(optim) if isinstance(optim, (list, tuple)) else [optim]
    found = [_inner_optimizer(one) for one in given]
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


def stage_of(ddp: DistributedDataParallel) -> Stage | None:
    """The stage that is registered, by overlap or with DDP itself.

    Raises:
        ConfigurationError: there is a hook that is not overlap's, and it may remember something.
    """
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
            f"the hook {hook_name(hook)} keeps its state in a {type(state).__name__}, which overlap cannot save; "
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


def _inner_optimizer(optim: object) -> Any:
    """The optimizer of this library in ``optim``, if ``optim`` is a framework's wrapper of one; else ``optim``."""
    if isinstance(optim, FunctionalOptimizer):
        return optim.optimizer
    if isinstance(optim, OptimizerProxy):
        return optim
    inner = getattr(optim, "optimizer", None)
    if isinstance(inner, (ZeroRedundancyOptimizer, OptimizerProxy)):
        return inner
    if not hasattr(optim, "param_groups") or not hasattr(optim, "load_state_dict"):
        raise ConfigurationError(
            f"{optim!r} is not an optimizer: give the one whose step() the training loop calls, or the one that the "
            "registered stage steps"
        )
    return optim


def _optimizer_state(optim: Any, names: Names) -> dict[str, Any]:
    """What :func:`_load_optimizer_state` takes."""
    state: dict[str, Any] = {"class": class_of(optim), "parameters": labels_of(optim, names)}
    if isinstance(optim, ZeroRedundancyOptimizer):
        return {**state, "own": vars(optim.sharded_state().part())}
    return {**state, "state": _without_stages(optim.state_dict())}


def _without_stages(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a LocalSGD saves of its stages is saved with the model's."""
    if "local_sgd" not in state:
        return dict(state)
    return {**state, "local_sgd": {**state["local_sgd"], "stages": {}}}


def _check_optimizer_state(optim: Any, names: Names, state: Mapping[str, Any]) -> None:
    """Raises: ConfigurationError: ``state`` is of another kind of optimizer, or of other parameters."""
    check_parameters(optim, names, state)
    if isinstance(optim, ZeroRedundancyOptimizer):
        check_part(optim.sharded_state(), state["own"], order_of(state["parameters"], labels_of(optim, names)))


def _load_optimizer_state(optim: Any, names: Names, state: Mapping[str, Any], stages: Mapping[str, Any] | None) -> None:
    """Load what :func:`_optimizer_state` returned; ``stages`` is the state of the stages, which a LocalSGD loads."""
    order = order_of(state["parameters"], labels_of(optim, names))
    if isinstance(optim, ZeroRedundancyOptimizer):
        optim.prepare_to_load()
        load_part(optim.sharded_state(), state["own"], order)
        return
    packed = dict(state["state"])
    if isinstance(optim, LocalSGD):
        packed["local_sgd"] = {**packed["local_sgd"], "stages": stages or {}}
    load_packed(optim, packed, order)


def _check_form(state: object) -> None:
    """Raises: ConfigurationError: ``state`` is something else than ``overlap.state_dict`` returns."""
    if not isinstance(state, Mapping) or set(state) != _KEYS or state["version"] != _VERSION:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ConfigurationError(
            f"this is not what overlap.state_dict(ddp, optim) returns (version {_VERSION}): {found}"
        )


def _check_place(group: dist.ProcessGroup, state: Mapping[str, Any]) -> None:
    """Raises: ConfigurationError: another rank has saved ``state``."""
    if (state["rank"], state["ranks"]) != (group.rank(), group.size()):
        raise ConfigurationError(
            f"the state was saved by rank {state['rank']} of {state['ranks']}, but this is rank {group.rank()} of "
            f"{group.size()}: each rank loads its own, or, if the number of ranks has changed, the list of all"
        )


def _check_model(here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises: ConfigurationError: names, shapes or dtypes differ."""
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
    """Raises: ConfigurationError: other stages were registered."""
    here = None if stage is None else _classes_of(stage)
    then = None if saved is None else saved["classes"]
    if here != then:
        raise ConfigurationError(
            f"the state was saved with {_told(then)} registered, and here {_told(here)} is: register the same stages "
            "before load_state_dict"
        )


def _classes_of(stage: Stage) -> list[str]:
    """The classes of a stage and of all that it is made of."""
    return [type(one).__name__ for one in walk(stage)]


def _told(classes: list[str] | None) -> str:
    return "no stage" if classes is None else " > ".join(classes)


def _snapshot(value: Any, where: str) -> Any:
    """A copy of a nested state with its tensors in CPU memory, which ``torch.load(weights_only=True)`` takes.

    Raises:
        ConfigurationError: something in it is neither a tensor nor a plain value; ``where`` names it.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        copied = {key: _snapshot(one, f"{where}[{key!r}]") for key, one in value.items()}
        if not hasattr(value, "_metadata"):
            return copied
        of_module: Any = OrderedDict(copied)
        of_module._metadata = value._metadata
        return of_module
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple, set)):
        members = [_snapshot(one, f"{where}[{place}]") for place, one in enumerate(value)]
        return members if isinstance(value, list) else tuple(members) if isinstance(value, tuple) else set(members)
    if hasattr(value, "dtype") and hasattr(value, "item"):  # A number of NumPy.
        return _snapshot(value.item(), where)
    raise ConfigurationError(
        f"{where} is a {type(value).__name__}, which is neither a tensor nor a plain value, so "
        "torch.load(weights_only=True) would refuse it: keep it apart, or as numbers and tensors"
    )
