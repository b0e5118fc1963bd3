"""How an optimizer is stepped: some of its parameters or all, unless gradients are not finite, and by nobody else.

[Note: stepping a subset]

An update in backward steps the parameters of one bucket, and a sharded one the part that a rank owns. Every
``torch.optim.Optimizer`` steps the parameters in its ``param_groups`` that have a ``.grad``, with the options and the
state that it finds there. So a part is stepped by a *twin*: an object of the optimizer's own class that shares its
attributes, ``state`` included, but whose groups list the part's parameters alone. LR schedulers, several groups and
third-party optimizers just work, and ``foreach`` and ``fused`` kernels run once per part and group. Where the kernels
are known, no twin is needed: see [Note: functional optimizers].

Many optimizers count their steps in ``group["step"]`` or in an attribute, and one step of the training loop is many
calls of a twin's ``step``. So each part begins with the groups and attributes as they were when the step began. Parts
must agree on the values that they write there, which are written back once; a value on which they disagree, such as
Prodigy's estimate, is an error. A group of which no part was stepped counts, too.

[Note: gradients that are not finite]

``GradScaler`` always steps an optimizer with ``_step_supports_amp_scaling``; before that it sets ``found_inf`` (a
gradient of this rank is not finite) and ``grad_scale`` on it. ``SkipNonFinite`` reaches such a verdict in a chain. Each
rank must then call ``step()``, even a skipped one.
"""

from __future__ import annotations

import gc
import inspect
import operator
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from overlap._checks import short_repr, type_name
from overlap._torch.autograd import label_type
from overlap._torch.device import has_streams
from overlap._torch.foreach import scale_
from overlap._torch.optimizer import (
    global_step_hooks_suspended,
    hook_attributes,
    is_around,
    no_step_hooks,
    pre_hooks,
    step_hooks,
    unhooked_step,
)
from overlap.errors import ConfigurationError, TrainingLoopError, UnsupportedError
from overlap.hooks.stage import is_same_state
from overlap.optim.kernels import FunctionalStep, Split

# The attributes of the optimizer, and the keys of a group, that no part writes back.
_SHARED = frozenset({"param_groups", "state", "defaults", *hook_attributes})
_MEMBERS = frozenset({"params", "param_names"})
_MISSING = object()
_grad_of = operator.attrgetter("grad")
_first_of = operator.itemgetter(0)
# Fused kernels do not; a weight that a later node of backward still needs is then autograd's own error.
_raise_versions = torch.autograd.graph.increment_version


def check_optimizer(optimizer: object) -> Optimizer:
    """``optimizer`` itself, if it can be stepped without a closure.

    Raises:
        ConfigurationError: it is not a ``torch.optim.Optimizer``.
        UnsupportedError: it needs a closure.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigurationError(
            f"expected a torch.optim.Optimizer, got {type_name(optimizer)}; make one, as in "
            "torch.optim.SGD(ddp.parameters(), lr=0.1)"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(
            f"{type(optimizer).__name__} evaluates the model again inside step(closure), so its update cannot be made "
            "in backward; use plain DDP with it"
        )
    return optimizer


class SubsetStepper:
    """Steps parts of ``optimizer``'s parameters. See [Note: stepping a subset].

    A step of the training loop is :meth:`begin`, any number of :meth:`step`, and :meth:`finish`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # The threads of two models may step parts of one optimizer at the same time.
        self._lock = threading.Lock()
        self._places: dict[int, int] = {}
        self.layout: list[list[int]] = []
        """The parameters of each group, by ``id``; another object whenever the optimizer has other ones."""
        self._splits: dict[tuple[int, ...], Split] = {}
        # The values that parts of the step under way have written, by the place of the group, or None for attributes.
        self._written: dict[int | None, dict[str, Any]] = {}
        self._kernels = FunctionalStep(optimizer)
        self.begin()

    def begin(self) -> None:
        """A new step begins: each parameter will be stepped at most once before the next call."""
        self.refresh()
        self._written = {}

    def covers(self, parameter: Tensor) -> bool:
        """Whether the optimizer has ``parameter``, as of the last :meth:`begin` or :meth:`refresh`."""
        return id(parameter) in self._places

    def step(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], **arguments: Any) -> None:
        """One update of ``parameters``, all of them the optimizer's, with ``gradients`` of their shapes and dtypes;
        under ``no_grad``.

        Changes the parameters and ``optimizer.state`` in place; ``.grad`` is as before, and so are groups and
        attributes until :meth:`finish`. ``arguments`` are of the optimizer's ``step``.

        Raises:
            UnsupportedError: a part has written another value to a group or an attribute than one before it.
        """
        if parameters:
            key = tuple(map(id, parameters))
            with self._lock:
                split = self._splits.get(key) or self._split(key, parameters)
                if arguments or not self._kernels.step(key, split, parameters, gradients):
                    self._step(split, parameters, gradients, arguments)
                    return
                for place, _ in split:
                    self._written.setdefault(place, {})
                _raise_versions(parameters)

    @torch.no_grad()
    def step_by_kernels(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
        """Make one whole step of the optimizer, in which ``parameters`` have these gradients, if kernels can and that
        has no step hooks; returns whether it was made."""
        before, after = step_hooks(self._optimizer)
        if not parameters or after or not all(isinstance(hook, StepGuard) for hook in before):
            return False
        self.refresh()
        with self._lock, label_type()(f"Optimizer.step#{type(self._optimizer).__name__}.step"):
            key = tuple(map(id, parameters))
            split = self._splits.get(key) or self._split(key, parameters)
            return self._kernels.step(key, split, parameters, gradients)

    def finish(self, **arguments: Any) -> dict[int, dict[str, Any]]:
        """The step ends: write back, once, the values that its parts have written. Returns those of groups, by place.

        Raises:
            UnsupportedError: as :meth:`step`.
        """
        with self._lock:
            written, groups = self._written, self._optimizer.param_groups
            rest = list(filterfalse(written.__contains__, range(len(groups))))
            if rest and (not written or any(written[place] for place in written if place is not None)):
                idle = [parameter for place in rest for parameter in groups[place]["params"]]
                self._step([(place, {}) for place in rest], idle, [None] * len(idle), arguments)
            for place, values in written.items():
                target = vars(self._optimizer) if place is None else groups[place]
                target.update(values)
            self._written = {}
            return {place: values for place, values in written.items() if place is not None}

    @torch.no_grad()
    def _step(
        self,
        split: Split,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        arguments: dict[str, Any],
    ) -> None:
        optimizer, cls, groups = self._optimizer, type(self._optimizer), self._optimizer.param_groups
        twin = cls.__new__(cls)
        twin.__dict__.update(optimizer.__dict__)
        twin.__dict__.update(no_step_hooks)
        twin.param_groups = own = []
        for place, members in split:
            own.append({**groups[place], **members})
        with grads_replaced(parameters, gradients), global_step_hooks_suspended():
            unhooked_step(cls)(twin, **arguments)
        self._note_written(split, twin)
        _raise_versions(parameters)

    def _note_written(self, split: Split, twin: Optimizer) -> None:
        """A part has been stepped: compare the values that it wrote, to groups and attributes, with earlier parts."""
        optimizer = self._optimizer
        places: list[int | None] = [None, *map(_first_of, split)]
        before_of = [vars(optimizer), *map(optimizer.param_groups.__getitem__, places[1:])]  # type: ignore[arg-type]
        for place, began, ended in zip(places, before_of, [vars(twin), *twin.param_groups], strict=True):
            writes, skipped = {}, _SHARED if place is None else _MEMBERS
            for key, value in ended.items():
                before = began.get(key, _MISSING)
                if value is not before and key not in skipped and not is_same_state(before, value):
                    writes[key] = value
            first = self._written.setdefault(place, writes)
            for key in () if first is writes else {**first, **writes}:
                one, other = first.get(key, began.get(key)), writes.get(key, began.get(key))
                if not is_same_state(one, other):
                    raise UnsupportedError(
                        f"{key!r} of this {type(optimizer).__name__} is {short_repr(one)} after a step with some "
                        f"parameters and {short_repr(other)} after one with others, so updating in parts does not "
                        "equal one step, and some parameters have been updated: load a checkpoint and start again with "
                        "chain(AllReduce(), Step(OverlappedOptimizer(optimizer), deferred=True)), which calls "
                        "optimizer.step() itself"
                    )

    def _split(self, key: tuple[int, ...], parameters: Sequence[Tensor]) -> Split:
        """``parameters``, of these ids, by the place of their group; it is kept."""
        if len(self._splits) > 2 * len(self._places):  # More than one step can have: other parts in every step.
            self._splits.clear()
            self._kernels.forget()
        members: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            members.setdefault(self._places[id(parameter)], []).append(parameter)
        self._splits[key] = split = []
        for place in sorted(members):
            group, own = self._optimizer.param_groups[place], members[place]
            split.append((place, {"params": own}))
            if "param_names" in group:
                names = dict(zip(map(id, group["params"]), group["param_names"], strict=True))
                split[-1][1]["param_names"] = [names[id(parameter)] for parameter in own]
        return split

    def refresh(self) -> None:
        """Look at groups, which parameters are in which, and state as they are now."""
        layout = [list(map(id, group["params"])) for group in self._optimizer.param_groups]
        if layout != self.layout:
            self.layout = layout
            self._splits.clear()
            self._places = {parameter: place for place, group in enumerate(layout) for parameter in group}
        self._kernels.refresh(self.layout)

    def forget_state(self) -> None:
        """Hold none of the optimizer's state, which is about to be replaced."""
        self._kernels.forget()


def step_whole(optimizer: Optimizer, **arguments: Any) -> None:
    """One ``step(**arguments)`` of ``optimizer`` itself, with its hooks and the gradients in ``.grad``."""
    hooks = pre_hooks(optimizer)
    guards = {key: hook for key, hook in hooks.items() if isinstance(hook, StepGuard)}
    for key in guards:
        del hooks[key]
    try:
        optimizer.step(**arguments)
    finally:
        hooks.update(guards)


@contextmanager
def grads_replaced(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Iterator[None]:
    """Let ``.grad`` of ``parameters`` be ``gradients``, and put back the gradients that were there."""
    before = list(map(_grad_of, parameters))
    try:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        yield
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


@dataclass(frozen=True)
class FoundInf:
    """Whether the gradients of a pass are finite: of a stage, or of ``GradScaler``; none at first. See [Note:
    gradients that are not finite]."""

    found_inf: Tensor | None = None
    """Not zero where a gradient is not finite, so that the update must change nothing; ``None``: nobody has asked."""
    scale: Tensor | None = None
    """The factor of the loss; ``None`` without a scaler, and where ``unscale_`` has divided gradients already."""

    @classmethod
    def given_to(cls, optimizer: Optimizer) -> FoundInf:
        return cls(optimizer.__dict__.get("found_inf"), optimizer.__dict__.get("grad_scale"))

    @classmethod
    def of_any(cls, verdicts: Iterable[FoundInf]) -> FoundInf:
        """Not finite where any of ``verdicts`` is not; without a scale."""
        found = [each.found_inf.reshape(()) for each in verdicts if each.found_inf is not None]
        return cls(torch.stack(found).amax() if len(found) > 1 else found[0] if found else None)

    def skips(self, optimizer: Optimizer) -> bool:
        """Whether ``optimizer`` is not to be stepped. On an accelerator this is left to its kernel, if that can skip,
        so that the host does not wait."""
        if self.found_inf is None or (has_streams(self.found_inf.device) and skips_by_itself(optimizer)):
            return False
        return bool(self.found_inf.item())

    def is_supported_by(self, optimizer: Optimizer) -> bool:
        """Whether there is a scaler's verdict, and ``optimizer`` unscales and skips by itself."""
        return self.found_inf is not None and bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def unscale_(self, gradients: Sequence[Tensor]) -> None:
        if self.scale is not None and gradients:
            scale_(gradients, self.scale.double().reciprocal().float())

    @contextmanager
    def passed_to(self, optimizer: Optimizer) -> Iterator[None]:
        """Set the verdict on ``optimizer`` while it steps, if that takes one, as ``GradScaler`` does."""
        if not self.is_supported_by(optimizer):
            yield
            return
        optimizer.grad_scale, optimizer.found_inf = self.scale, self.found_inf  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]


def skips_by_itself(optimizer: Optimizer) -> bool:
    """Whether the kernel of ``optimizer`` takes ``found_inf`` and then changes nothing; SGD's does not with
    momentum."""
    is_supported = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return is_supported and not any(group.get("momentum") for group in optimizer.param_groups)


class StepGuard:
    """A pre-hook of an optimizer that raises if anyone but the library steps it, for as long as the model lives.

    ``through`` is the wrapper by whose ``step`` it may be stepped all the same, which shares the hook or, of several
    optimizers, says when it steps them; ``None`` where all is done in backward.
    """

    def __init__(self, stage: Any, *, through: Any = None, instead: str = "apply the gradients again") -> None:
        self._stage = weakref.ref(stage)
        self._through = None if through is None else weakref.ref(through)
        self._name, self._instead = type(through).__name__, instead

    @property
    def stage(self) -> Any:
        """The stage, if it and its model are alive; ``None`` else."""
        stage = self._stage()
        context = None if stage is None else stage.lifecycle.context
        return None if context is None or (context.ddp is not None and context.ddp() is None) else stage

    def detach_if_dead(self) -> bool:
        """Whether the stage updates no model any more; it then lets go of the optimizer."""
        if self.stage is not None:
            gc.collect()  # A model that was dropped is often part of a cycle.
        if self.stage is not None:
            return False
        if (stage := self._stage()) is not None and stage.lifecycle.context is not None:
            stage.detach()
        return True

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        through = None if self._through is None else self._through()
        is_own = through is not None and (is_around(optimizer, through) or getattr(through, "is_stepping", False))
        if is_own or self.detach_if_dead():
            return
        name = type(optimizer).__name__
        if self._through is not None:
            raise TrainingLoopError(
                f"this {name} is stepped by the {self._name} that wraps it, and its own step() would {self._instead}: "
                f"call step() of the {self._name}"
            )
        raise TrainingLoopError(
            f"this {name} is stepped inside backward, and step() would apply the gradients again: leave the call out, "
            "or give OverlappedOptimizer(optimizer) to Step and call that one's step() (with GradScaler, of a Step "
            "with deferred=True)"
        )
