"""Stepping a part of an optimizer's parameters.

[Note: stepping a subset]

An update in backward steps the parameters of one bucket, with whatever optimizer the user chose. Every
``torch.optim.Optimizer`` steps the parameters in its ``param_groups`` that have a ``.grad``, with the hyperparameters
and the state that it finds there. So a bucket is stepped by a *twin*: an object of the optimizer's own class that
shares all its attributes, ``state`` included, but whose groups list the bucket's parameters alone, with the groups'
hyperparameters as they are at that moment. LR schedulers, several groups and third-party optimizers just work, and
``foreach`` and ``fused`` kernels run once per bucket and group.

What the twin's ``step`` writes (an attribute, a value in a group) is written back. If two buckets of one backward
both change the same value, it counts calls of ``step`` or mixes parameters, and updating bucket by bucket would not
be the same as one step: that is refused, and the deferred mode, which steps all parameters at once, serves instead.
Most of that is found out when a stage is registered (see [Note: what an optimizer couples]); this is a second check,
and so is a look at the other parameters' version counters in the first steps.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer, SparseAdam

from overlap._checks import described
from overlap._torch.autograd import version
from overlap._torch.isolation import global_step_hooks_suspended
from overlap._torch.optimizer import drop_hooks, hook_attributes, unhooked_step
from overlap.errors import ConfigurationError, UnsupportedError
from overlap.optim.step_guard import guards_lifted
from overlap.optim.step_snapshot import StepSnapshot
from overlap.optim.update_stream import ordered_after_gradients

__all__ = ["CoupledError", "SubsetStepper", "check_optimizer", "grads_replaced", "raise_versions", "step_whole"]

# Steps after which what a step reaches is taken to be known.
_WATCHED_STEPS = 10

_SHARED = frozenset({"param_groups", "state", "defaults", *hook_attributes})
_MEMBERS = frozenset({"params", "param_names"})


class CoupledError(UnsupportedError):
    """Stepping in parts is not the same as stepping at once."""

    what = ""
    """What was seen of that, in words."""


def check_optimizer(optimizer: object) -> Optimizer:
    """``optimizer`` itself, if it can be stepped without a closure on dense gradients.

    Raises:
        ConfigurationError: it is not a ``torch.optim.Optimizer``.
        UnsupportedError: it needs a closure, or sparse gradients.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"expected a torch.optim.Optimizer, got {described(optimizer)}; make one, as in "
            "torch.optim.SGD(ddp.parameters(), lr=0.1)"
        )
    name = type(optimizer).__name__
    if isinstance(optimizer, SparseAdam):
        raise UnsupportedError(f"{name} works on sparse gradients, and stages on dense ones; use Adam")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if isinstance(optimizer, LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise UnsupportedError(
            f"{name} evaluates the model again inside step(closure), so its update cannot be made in backward; "
            "use plain DDP with it"
        )
    return optimizer


class SubsetStepper:
    """Steps parts of ``optimizer``'s parameters. See [Note: stepping a subset]."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._written: set[tuple[str, int | None]] = set()
        self._steps = 0
        # The threads of two models may step parts of one optimizer at the same time.
        self._lock = threading.Lock()
        self._places: dict[int, int] = {}
        self._layout: tuple[tuple[int, ...], ...] = ()
        self._splits: dict[tuple[int, ...], list[tuple[int, list[Tensor]]]] = {}
        self._known_state: Mapping[Any, Any] | None = None
        self._known_entries = (0, 0)
        self._beside_keys: list[Any] = []
        self.refresh()

    def __reduce__(self) -> Any:
        return SubsetStepper, (self._optimizer,)

    def begin(self) -> None:
        """A new step begins: each parameter will be stepped at most once before the next call."""
        self._written.clear()
        self._steps += 1
        self.refresh()

    @property
    def layout(self) -> object:
        """Another object whenever the optimizer has other parameters or groups, as of the last :meth:`begin`."""
        return self._layout

    def covers(self, parameter: Tensor) -> bool:
        """Whether the optimizer has ``parameter``, as of the last :meth:`begin` or :meth:`refresh`."""
        return id(parameter) in self._places

    @torch.no_grad()
    def step(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], *, is_whole: bool = False, **arguments: Any
    ) -> None:
        """One update of ``parameters``, all of them the optimizer's, with ``gradients`` of their shapes and dtypes.

        Changes the parameters and ``optimizer.state`` in place; ``.grad`` is as before.

        Args:
            parameters: those to step.
            gradients: theirs.
            is_whole: no other part follows, so the optimizer steps groups of which no parameter is given, too.
            **arguments: of the optimizer's ``step``.

        Raises:
            UnsupportedError: updating in parts is not the same as updating at once, for this optimizer.
        """
        if not parameters and not is_whole:
            return
        with self._lock:
            if len(parameters) == len(self._places):
                self._step_all(parameters, gradients, arguments)
            else:
                self._step(parameters, gradients, is_whole, arguments)

    def _step_all(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], arguments: dict[str, Any]) -> None:
        """A step that is whole cannot differ from one: there is nothing to look at before and after it."""
        own = self._optimizer.__dict__
        twin = self._twin_of(self._optimizer.param_groups)
        with (
            grads_replaced(parameters, gradients),
            global_step_hooks_suspended(),
            ordered_after_gradients(self._optimizer, parameters),
        ):
            unhooked_step(type(self._optimizer))(twin, **arguments)
        own.update((key, value) for key, value in twin.__dict__.items() if key not in _SHARED)
        raise_versions(parameters, twin.param_groups)

    def _step(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], is_whole: bool, arguments: dict[str, Any]
    ) -> None:
        split = self._split(parameters)
        if is_whole:
            split = [(place, dict(split).get(place, [])) for place in range(len(self._optimizer.param_groups))]
        twin = self._twin(split)
        attributes = StepSnapshot(twin.__dict__, skipped=_SHARED)
        shared = StepSnapshot(self._beside(twin.state))
        groups = [StepSnapshot(group, skipped=_MEMBERS) for group in twin.param_groups]
        others = self._others(parameters) if self._steps <= _WATCHED_STEPS else []
        versions = [version(parameter) for parameter in others]
        with (
            grads_replaced(parameters, gradients),
            global_step_hooks_suspended(),
            ordered_after_gradients(self._optimizer, parameters or self._others(parameters)),
        ):
            unhooked_step(type(self._optimizer))(twin, **arguments)
        if any(version(parameter) != before for parameter, before in zip(others, versions, strict=True)):
            self._refuse_reach()
        for (place, _), group, values in zip(split, groups, twin.param_groups, strict=True):
            for key in group.changed(values):
                self._note_write(key, place)
                self._optimizer.param_groups[place][key] = values[key]
        for key in attributes.changed(twin.__dict__):
            self._note_write(key, None)
            self._optimizer.__dict__[key] = twin.__dict__[key]
        for key in shared.changed(self._beside(twin.state)):
            self._note_write(key, None)
        raise_versions(parameters, twin.param_groups)

    def _twin(self, split: list[tuple[int, list[Tensor]]]) -> Optimizer:
        groups = self._optimizer.param_groups
        return self._twin_of([_reduced(groups[place], parameters) for place, parameters in split])

    def _twin_of(self, groups: list[dict[str, Any]]) -> Optimizer:
        cls = type(self._optimizer)
        twin = cls.__new__(cls)
        twin.__dict__.update(self._optimizer.__dict__)
        twin.param_groups = groups
        drop_hooks(twin)
        return twin

    def _beside(self, state: dict[Any, Any]) -> dict[Any, Any]:
        """What ``state`` holds of no parameter; looked for anew only where entries have come or gone."""
        entries = len(state), id(next(reversed(state), None))  # What comes in the place of another comes last.
        if state is not self._known_state or entries != self._known_entries:
            self._known_state, self._known_entries = state, entries
            self._beside_keys = [key for key in state if not isinstance(key, Tensor)]
        return {key: state[key] for key in self._beside_keys if key in state}

    def _others(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        stepped = set(map(id, parameters))
        return [p for group in self._optimizer.param_groups for p in group["params"] if id(p) not in stepped]

    def _refuse_reach(self) -> None:
        error = CoupledError(
            f"{type(self._optimizer).__name__}.step() has changed parameters that it was not asked to step, with "
            "gradients that were not reduced: load a checkpoint, and start again with "
            "Step(OverlappedOptimizer(optimizer), deferred=True)"
        )
        error.what = "its step() changes parameters that it is not given"
        raise error

    def _note_write(self, key: str, place: int | None) -> None:
        if (key, place) in self._written:
            error = CoupledError(
                f"{type(self._optimizer).__name__}.step() changes {key!r} at every call, so updating bucket by "
                "bucket would not equal one step; start again with Step(optimizer, deferred=True)"
            )
            error.what = f"its step() changes {key!r} at every call"
            raise error
        self._written.add((key, place))

    def _split(self, parameters: Sequence[Tensor]) -> list[tuple[int, list[Tensor]]]:
        """``parameters`` by the place of their group, cached: buckets hold the same parameters step after step."""
        key = tuple(map(id, parameters))
        if key not in self._splits:
            groups: dict[int, list[Tensor]] = {}
            for parameter in parameters:
                groups.setdefault(self._places[id(parameter)], []).append(parameter)
            self._splits[key] = sorted(groups.items())
        return self._splits[key]

    def refresh(self) -> None:
        """Look at which parameters are in which group now."""
        layout = tuple(tuple(map(id, group["params"])) for group in self._optimizer.param_groups)
        if layout != self._layout:
            self._layout = layout
            self._splits.clear()
            self._places = {parameter: place for place, group in enumerate(layout) for parameter in group}


def _reduced(group: dict[str, Any], parameters: list[Tensor]) -> dict[str, Any]:
    """A group with these of its parameters alone, and their names if it has names."""
    if "param_names" not in group:
        return {**group, "params": parameters}
    names = dict(zip(map(id, group["params"]), group["param_names"], strict=True))
    return {**group, "params": parameters, "param_names": [names[id(parameter)] for parameter in parameters]}


def raise_versions(parameters: Sequence[Tensor], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise the version counters of ``parameters`` that were updated in backward, where ``groups`` are fused.

    Fused kernels leave them as they are; with them raised, a weight that a later node of this backward still needs is
    autograd's own error instead of a wrong gradient.
    """
    if any(group.get("fused") for group in groups):
        torch.autograd.graph.increment_version(parameters)


def step_whole(optimizer: Optimizer, **arguments: Any) -> None:
    """One ``step(**arguments)`` of ``optimizer`` itself, hooks and all, with what is in ``.grad``; any can do that."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    with guards_lifted(optimizer), ordered_after_gradients(optimizer, parameters):
        optimizer.step(**arguments)


@contextmanager
def grads_replaced(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Iterator[None]:
    """Let ``.grad`` of ``parameters`` be ``gradients``, and put back what was there."""
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
