"""The state of one rank: model, optimizers and stages; and the same of another number of ranks.

Each part of a state has one rule for another number of ranks; see docs/resuming.md.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from overlap._checks import check_ddp
from overlap._torch.ddp import plain_name, registered_hook
from overlap.errors import ConfigurationError, TrainingLoopError
from overlap.hooks import PostLocal, Role, Stage, StageHook
from overlap.hooks.adapters import HookStage, hook_name
from overlap.hooks.engine.registration import registration_of
from overlap.hooks.stage import is_same_state, redistributed, updates_of, walk
from overlap.hooks.states import uncopied, under
from overlap.optim import FunctionalOptimizer, LocalSGD, OverlappedOptimizer, ZeroRedundancyOptimizer
from overlap.optim.lifecycle import Event, Phase, UpdateLifecycle
from overlap.optim.local_sgd.inner import AveragingOptimizer
from overlap.optim.optimizer import OptimizerProxy
from overlap.optim.zero.checkpoint import load_as_saved, of_version_0_1_0
from overlap.ranks.values import snapshot

OneOptim = Optimizer | FunctionalOptimizer
Optim = OneOptim | Sequence[OneOptim] | None
State = Mapping[str, Any]

VERSION = 3
_FIRST_VERSION = 2
"""That of version 0.1.0 of the package, whose states load, too."""
_OF_STAGES = {"version", "rank", "ranks", "stages"}
_KEYS = {*_OF_STAGES, "model", "optimizer"}


def state_dict(ddp: DistributedDataParallel, optim: Optim = None) -> dict[str, Any]:
    """All that this rank needs to resume its run exactly: each rank saves its own.

    It holds the model, the optimizers (of a ``ZeroRedundancyOptimizer`` this rank's share) and the state of the
    registered stages; not gradients, schedulers, ``GradScaler``, the position in the data and PyTorch's generators. It
    is a snapshot in CPU memory that ``torch.load(..., weights_only=True)`` loads. The memory of stages is as the last
    step has left it; of a chain without an update, which learns of no step, as the last backward has, unless
    ``registration.discard()`` was called.

    Args:
        ddp: the model.
        optim: the optimizer of the training loop, or a list of all where it has several; ``None`` saves none.

    Communication: none; waits for gathers and averages that are under way.

    Raises:
        TrainingLoopError: between backward and ``step()``, since gradients are not saved.
        ConfigurationError: the model is not in DDP, or has a hook or a state that cannot be saved; or a registered
            stage updates with an optimizer that is not given.

    >>> optim = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))
    >>> chain(PowerSGD(rank=1), Step(optim)).register(ddp)
    <chain(PowerSGD(rank=1), Step(SGD, interleaved)) registered>
    >>> sorted(overlap.state_dict(ddp, optim))
    ['model', 'optimizer', 'rank', 'ranks', 'stages', 'version']
    """
    return RankState(ddp, optim, "state_dict").state_dict()


def load_state_dict(ddp: DistributedDataParallel, optim: Optim, state: State | Sequence[State]) -> None:
    """Load a state that :func:`state_dict` returned on this rank; call it on every rank, after stages are registered.

    Of the list of the states of all ranks it loads this rank's, or its part at another number of ranks, as
    docs/resuming.md describes. Everything is compared by name before anything is changed. A plain optimizer's state
    loads into an ``OverlappedOptimizer``, and the other way round. Later steps do not change ``state``.

    Args:
        ddp: the model, with the same stages registered as in the run that was saved.
        optim: its optimizer, or the list of them in the order in which they were saved, or ``None`` if none was; with
            its parameters in the order in which they were saved.
        state: this rank's, or the list of those of all ranks.

    Communication: none.

    Raises:
        ConfigurationError: the state is another rank's, another number of ranks', or another model's, optimizer's or
            chain's.
        TrainingLoopError: between backward and ``step()``, where the update was made in backward.

    >>> optim = OverlappedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))
    >>> registration = chain(PowerSGD(rank=1), Step(optim)).register(ddp)
    >>> state = overlap.state_dict(ddp, optim)
    >>> overlap.load_state_dict(ddp, optim, state)  # in a new process, after the same registration
    """
    run = RankState(ddp, optim, "load_state_dict")
    run.load_state_dict(run.state_of_rank(state) if isinstance(state, Sequence) else state)


class RankState:
    """The state of this rank: of a model in DDP, its optimizers and its registered stages.

    Arguments are those of :func:`state_dict`, and the name of the function that the user has called, for messages.
    """

    def __init__(self, ddp: DistributedDataParallel, optim: Optim, function: str) -> None:
        self._ddp = check_ddp(ddp)
        group = self._ddp.process_group
        self.rank, self.ranks = group.rank(), group.size()
        self.stage = stage_of(self._ddp)
        stages = [] if self.stage is None else list(walk(self.stage))
        self.classes = None if self.stage is None else [type(one).__name__ for one in stages]
        found = [getattr(one, "lifecycle", None) for one in stages]
        self._lifecycles = [lifecycle for lifecycle in found if isinstance(lifecycle, UpdateLifecycle)]
        self.names = {parameter: plain_name(name) for name, parameter in self._ddp.module.named_parameters()}
        module = self._ddp.module
        self.parameters = {plain_name(name) for name, _ in module.named_parameters(remove_duplicate=False)}
        self._buffers = {plain_name(name) for name, _ in module.named_buffers(remove_duplicate=False)}
        self._ignored = set(map(plain_name, self._ddp.parameters_to_ignore))
        given = [] if optim is None else list(optim) if isinstance(optim, (list, tuple)) else [optim]
        self.optimizers = [_inner_optimizer(one) for one in given]
        if len(set(map(id, self.optimizers))) < len(given):
            raise ConfigurationError(f"{function} was given one optimizer twice; give each once")
        covered = {id(p) for one in self.optimizers for group in one.param_groups for p in group["params"]}
        for update in updates_of(self.stage.sequence) if self.stage is not None and given else ():
            if any(id(parameter) not in covered for parameter in update.updated):
                raise ConfigurationError(
                    f"{update!r} is registered, and {function} was not given its optimizer, whose state would be lost: "
                    f"give a list of all, {function}(ddp, [first, second])"
                )

    # Values that ranks have in common, by declaration.

    @property
    def trains_apart(self) -> bool:
        """Whether ranks may have models of their own, between two averages."""
        stages = () if self.stage is None else walk(self.stage)
        is_averaged = any(one.role is Role.AVERAGER or isinstance(one, PostLocal) for one in stages)
        return is_averaged or any(isinstance(one, AveragingOptimizer) for one in self.optimizers)

    def has_common(self, name: str) -> bool:
        """Whether DDP keeps this entry of the model's state the same on all ranks."""
        is_kept = name in self.parameters or (self._ddp.broadcast_buffers and name in self._buffers)
        return is_kept and name not in self._ignored

    def is_own(self, place: int) -> bool:
        """Whether a replicated optimizer, by its place, has a state of each rank: of parameters that may differ."""
        optim = self.optimizers[place]
        names = [name for labels in self._labels_of(optim) for name in labels]
        is_divided = isinstance(optim, ZeroRedundancyOptimizer)
        return self.trains_apart or not (is_divided or all(map(self.has_common, names)))

    def state_dict(self, *, stages_only: bool = False) -> dict[str, Any]:
        """As :func:`state_dict`; with ``stages_only`` without the model and the optimizers."""
        copied: dict[str, Any] = snapshot(self.state(stages_only=stages_only))
        return copied

    def state(self, *, stages_only: bool = False) -> dict[str, Any]:
        """:meth:`state_dict` of the tensors themselves, to be copied or written before the next forward."""
        for lifecycle in self._lifecycles:
            if lifecycle.phase in (Phase.BACKWARD, Phase.REDUCED, Phase.APPLIED):
                raise TrainingLoopError(
                    f"state_dict() between backward and {lifecycle.form.step}: gradients are not saved, so this step "
                    f"would be lost; call {lifecycle.form.step} first"
                )
        self._wait()
        with uncopied():
            stages = None if self.stage is None else {"classes": self.classes, "state": self.stage.state_dict()}
            state: dict[str, Any] = {"version": VERSION, "rank": self.rank, "ranks": self.ranks, "stages": stages}
            if not stages_only:
                state["model"] = {plain_name(name): value for name, value in self._ddp.module.state_dict().items()}
                state["optimizer"] = [self._state_of(one) for one in self.optimizers]
        return state

    def _state_of(self, optim: Any) -> dict[str, Any]:
        state: dict[str, Any] = {"class": class_of(optim), "parameters": self._labels_of(optim)}
        if isinstance(optim, ZeroRedundancyOptimizer):
            return {**state, **optim.sharded_state().own()}
        own = dict(optim.state_dict())
        if isinstance(optim, LocalSGD):  # Its stages are saved with the model's.
            own["local_sgd"] = {key: value for key, value in own["local_sgd"].items() if key != "stages"}
        return {**state, "state": own}

    def load_state_dict(self, state: State, *, stages_only: bool = False) -> None:
        """Load a state of this rank, as :func:`load_state_dict`; with ``stages_only`` that of the stages."""
        state = self.upgraded(state)
        self.check(state, stages_only=stages_only)
        # Optimizers keep the tensors that they load, and change them in place.
        self.load_checked({**state, "optimizer": copy.deepcopy(state.get("optimizer", ()))})

    def check(self, state: State, *, stages_only: bool = False) -> None:
        """Raises: ConfigurationError, TrainingLoopError: as :func:`load_state_dict`."""
        _check_keys(state, _OF_STAGES if stages_only else _KEYS)
        if (state["rank"], state["ranks"]) != (self.rank, self.ranks):
            raise ConfigurationError(
                f"the state was saved by rank {state['rank']} of {state['ranks']}, but this is rank {self.rank} of "
                f"{self.ranks}: each rank loads its own, or, if the number of ranks has changed, the list of all"
            )
        self._check_stages(state)
        if "model" in state:
            self._check_model(state["model"])
            self._check_optimizers(state["optimizer"])
            for optim, saved in zip(self.optimizers, state["optimizer"], strict=True):
                if isinstance(optim, ZeroRedundancyOptimizer):
                    optim.sharded_state().check(saved)
                    continue
                if isinstance(optim, LocalSGD) and saved["state"].get("local_sgd") is not None:
                    optim.averager.check(saved["state"]["local_sgd"])
        for lifecycle in self._lifecycles:
            lifecycle.check(Event.LOAD)

    @torch.no_grad()
    @uncopied()
    def load_checked(self, state: dict[str, Any]) -> None:
        """Load a state that has passed :meth:`check`, part by part, each of which is then removed from it."""
        self._wait()
        stages, model, optimizers = (state.pop(key, None) for key in ("stages", "model", "optimizer"))
        if self.stage is not None:
            self.stage.load_state_dict(stages["state"])
        del stages
        if model is not None:
            here = self._ddp.module.state_dict()
            self._ddp.module.load_state_dict({name: model[plain_name(name)] for name in here})
        del model
        for optim, saved in zip(self.optimizers, optimizers or (), strict=False):
            if isinstance(optim, ZeroRedundancyOptimizer):
                optim.prepare_to_load()
                optim.sharded_state().load(saved)
            else:
                load_as_saved(optim, saved["state"])

    def _check_model(self, saved: State) -> None:
        here = {plain_name(name): value for name, value in self._ddp.module.state_dict().items()}
        if set(here) != set(saved):
            raise ConfigurationError(f"the state is another model's, which {_difference(saved, here)}")
        for name, value in here.items():
            if not isinstance(value, Tensor):
                continue
            if not isinstance(saved[name], Tensor):
                raise ConfigurationError(f"the state is another model's: {name} is not a tensor in it")
            if (value.shape, value.dtype) != (saved[name].shape, saved[name].dtype):
                raise ConfigurationError(
                    f"the state is another model's: {name} is {tuple(saved[name].shape)} {saved[name].dtype} in it, "
                    f"and {tuple(value.shape)} {value.dtype} here"
                )

    def _check_stages(self, state: State) -> None:
        then = state["stages"] and state["stages"]["classes"]
        if self.classes != then:
            saved, here = ("no stage" if one is None else " > ".join(one) for one in (then, self.classes))
            raise ConfigurationError(
                f"the state was saved with {saved} registered, and here {here} is: register the same stages before "
                "load_state_dict"
            )

    def _check_optimizers(self, states: Sequence[State]) -> None:
        if len(self.optimizers) != len(states):
            raise ConfigurationError(
                f"the state was saved with {len(states)} optimizers, and load_state_dict was given "
                f"{len(self.optimizers)}"
            )
        for optim, state in zip(self.optimizers, states, strict=True):
            if state["class"] != class_of(optim):
                raise ConfigurationError(
                    f"the state is of an optimizer of class {state['class']}, but this one is a {class_of(optim)}: "
                    "give optimizers in the order in which they were saved"
                )
            saved, here = state["parameters"], self._labels_of(optim)
            if len(saved) != len(here):
                raise ConfigurationError(f"the optimizer's state is of {len(saved)} groups, and there are {len(here)}")
            for place, (then, now) in enumerate(zip(saved, here, strict=True)):
                if then != now:
                    raise ConfigurationError(
                        f"the optimizer's state is of other parameters: group {place} {_difference(then, now)}; make "
                        "the same groups of the same parameters, in the same order, as in the run that was saved"
                    )

    def _labels_of(self, optim: Any) -> list[list[str]]:
        """Of each group, the names of its parameters; of those outside of the model, their shapes."""
        return [
            [self.names.get(p) or f"outside of the model: {tuple(p.shape)}" for p in group["params"]]
            for group in optim.param_groups
        ]

    def _wait(self) -> None:
        """Wait for gathers that are under way."""
        for one in self.optimizers:
            if isinstance(one, ZeroRedundancyOptimizer):
                one.wait()

    # Another number of ranks.

    def state_of_rank(self, states: Sequence[State]) -> State:
        """This rank's of the states of all ranks, whatever their number was; parts that all lack are left out.

        Parameters are the same on all old ranks. Buffers that differ and the state of a plain optimizer, the inner
        one of a ``LocalSGD`` too, are those of old rank ``r`` modulo their number; that of a
        ``ZeroRedundancyOptimizer`` is put together; stages have rules of their own, :meth:`Stage.redistribute`.

        Raises:
            ConfigurationError: they are not those of all ranks of one run, each once; or they do not belong together,
                or were saved where ranks have different models.
        """
        for one in states:
            _check_keys(one, _OF_STAGES)
        numbers, sizes = [state["rank"] for state in states], sorted({state["ranks"] for state in states})
        if sizes != [len(states)] or sorted(numbers) != list(range(len(states))):
            raise ConfigurationError(
                f"these are the states of ranks {numbers} of {', '.join(map(str, sizes)) or 'none'}: give those of all "
                "ranks of one run, each once"
            )
        olds = sorted(states, key=lambda state: int(state["rank"]))
        if len(olds) == self.ranks:
            return olds[self.rank]
        if any(old["version"] != VERSION for old in olds):
            raise ConfigurationError(
                f"version 0.1.0 has saved this, and it loads on {len(olds)} ranks alone: load it there, and save again"
            )
        for old in olds:
            self._check_stages(old)
            if "model" in old:
                self._check_model(old["model"])
                self._check_optimizers(old["optimizer"])
        base = {**olds[self.rank % len(olds)], "rank": self.rank, "ranks": self.ranks}
        if self.stage is not None:
            memories = [old["stages"]["state"] for old in olds]
            made = redistributed(self.stage, memories, rank=self.rank, ranks=self.ranks)
            base["stages"] = {**base["stages"], "state": made}
        if "optimizer" in base:
            of_ranks = zip(*(old["optimizer"] for old in olds), strict=True)
            base["optimizer"] = [self.redistributed(place, one) for place, one in enumerate(of_ranks)]
        for name in self.names.values() if "model" in base else ():
            for rank, old in enumerate(olds):
                if not is_same_state(old["model"].get(name), olds[0]["model"].get(name)):
                    raise ConfigurationError(
                        f"the old ranks had different models: {name} of rank {rank} is not that of rank 0. The states "
                        "are of different checkpoints, or were saved while ranks train apart: save where they have "
                        "just averaged, or resume with as many ranks as before"
                    )
        return base

    def upgraded(self, state: State) -> State:
        """A state of this rank in the form of this version."""
        _check_keys(state, _OF_STAGES)
        if state["version"] == VERSION or (state["rank"], state["ranks"]) != (self.rank, self.ranks):
            return state
        made = {**state, "version": VERSION}
        if "optimizer" in state:
            self._check_model(state["model"])
            self._check_optimizers(state["optimizer"])
            made["optimizer"] = [
                {**one, **optim.sharded_state().merged([of_version_0_1_0(one["own"])])} if "own" in one else one
                for optim, one in zip(self.optimizers, state["optimizer"], strict=True)
            ]
        return made

    def redistributed(self, place: int, states: Sequence[State]) -> State:
        """The state of an optimizer, by its place, from those of all old ranks."""
        optim, base = self.optimizers[place], states[self.rank % len(states)]
        if isinstance(optim, ZeroRedundancyOptimizer):
            return {**base, **optim.sharded_state().merged(states)}
        if isinstance(optim, LocalSGD):
            return {**base, "state": LocalSGD.redistribute(under(states, "state"), rank=self.rank, ranks=self.ranks)}
        return dict(base)


def _check_keys(state: Any, least: Collection[str]) -> None:
    """Raises: ConfigurationError: ``state`` is no state of this version, or lacks one of these keys."""
    is_one = isinstance(state, Mapping) and set(least) <= set(state) <= _KEYS
    if not is_one or state["version"] not in (VERSION, _FIRST_VERSION):
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ConfigurationError(
            f"this is not what overlap.state_dict(ddp, optim) returns (version {VERSION}): {found}"
        )


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
    if state is not None and not isinstance(state, dist.ProcessGroup):
        raise ConfigurationError(
            f"the hook {hook_name(hook)} keeps its state in a {type(state).__name__}, which overlap cannot save; "
            "use overlap's hook of that name, or a stage with a state_dict()"
        )


def _inner_optimizer(optim: object) -> Any:
    """The optimizer of this library in ``optim``, if ``optim`` is a framework's wrapper of one; else ``optim``."""
    if isinstance(optim, FunctionalOptimizer):
        return optim.optimizer
    inner = getattr(optim, "optimizer", None)
    if not isinstance(optim, OptimizerProxy) and isinstance(inner, (ZeroRedundancyOptimizer, OptimizerProxy)):
        return inner
    if not hasattr(optim, "param_groups") or not hasattr(optim, "load_state_dict"):
        raise ConfigurationError(
            f"{optim!r} is not an optimizer: give the one whose step() the training loop calls, or the one that the "
            "registered stage steps"
        )
    return optim


def class_of(optim: Any) -> str:
    """The class of the optimizer that does the arithmetic, and the one that divides or averages it."""
    if isinstance(optim, ZeroRedundancyOptimizer):
        return f"ZeroRedundancyOptimizer({type(optim.optim).__name__})"
    inner = getattr(optim, "optimizer", None)
    # An OverlappedOptimizer has the same state whether the update is made in backward or after it.
    if isinstance(optim, OptimizerProxy) and not isinstance(optim, OverlappedOptimizer):
        return f"{type(optim).__name__}({class_of(inner)})"
    return class_of(inner) if isinstance(inner, Optimizer) else type(optim).__name__


def _difference(saved: Collection[str], here: Collection[str]) -> str:
    lacks, adds = ([name for name in one if name not in other] for one, other in ((here, saved), (saved, here)))
    if not lacks and not adds:
        return "has them in another order"
    parts = [f"{verb} {', '.join(names[:3])}" for verb, names in (("lacks", lacks), ("adds", adds)) if names]
    return " and ".join(parts)
