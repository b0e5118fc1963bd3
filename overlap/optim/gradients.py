"""The gradients of one update: which were reduced, which were applied, and how the loop may use them.

[Note: gradients of an update]

- A gradient that the library did not make is never cleared or overwritten.
- One that has been applied is never applied again. It stays readable until the model's next forward clears it.
- An edit of one that was applied in backward would be lost, so such gradients are handed over read-only, until
  ``step()``, or where the loop calls none, until the next forward. See [Note: guarded gradients].
- One of which this rank has only a part, or whose memory was released, cannot be read, either.

Local SGD without an update in backward is an ordinary optimizer, and only clears gradients of a failure.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, repeat
from typing import Any

import torch
from torch import Tensor

from overlap._checks import PLAIN_TYPES
from overlap._torch.autograd import versions
from overlap._torch.read_only import GradAccessPolicy, GuardedGradient, around, set_grad

_grad_of = operator.attrgetter("grad")
_is_view = operator.methodcaller("_is_view")
_plain_of = operator.attrgetter("plain")
# A loop over hundreds of parameters takes twice as long.
_run_all: Callable[[Iterable[None]], object] = partial(deque, maxlen=0)
_NOT_LEFT = frozenset({type(None), GuardedGradient})
_PLAIN = frozenset(PLAIN_TYPES)


@dataclass(frozen=True, slots=True)
class _HandedOver:
    """The gradients of a pass that were handed over, in wrappers."""

    parameters: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    wrappers: list[GuardedGradient] = field(default_factory=list)
    are_parts: bool = False

    def are_there(self) -> list[bool]:
        return list(map(operator.is_, map(_grad_of, self.parameters), self.wrappers))


class PassGradients:
    """Of which of an update's parameters the last backward reduced the gradients, and which have been applied.

    These methods write ``.grad``, in the order of a step: :meth:`wrap_grads` after backward, :meth:`unwrap_grads` in
    ``step()``, :meth:`clear_applied` in the next forward; and :meth:`note_zero_grad` and :meth:`clear_all` where the
    loop or a failure comes between.

    Args:
        owns: whether the gradient of a parameter is this update's to clear.
        policy: of the gradients that are handed over.
    """

    def __init__(self, owns: Callable[[Tensor], bool], policy: GradAccessPolicy) -> None:
        self.owns = owns
        self._policy = policy
        self.reduced: dict[int, Tensor] = {}
        """By ``id``, the parameters whose gradients came in a bucket of the last backward."""
        self.applied: dict[int, Tensor] = {}
        """By ``id``, those whose gradients have been applied."""
        self.unused: set[int] = set()
        """By ``id``, those that no rank has used in the last backward, as far as was asked: DDP leaves their
        ``.grad``."""
        self.released: set[int] = set()
        """By ``id``, those whose gradients were applied, and their memory released."""
        self.has_parts = False
        """Whether ``.grad`` is the mean only where this rank owns it, after the last backward."""
        self._handed = _HandedOver()
        # The same of the pass before, if its gradients are DDP's views of its buckets, which come again in every pass.
        self._kept: _HandedOver | None = None
        self._is_first_pass = True
        # The ordinary tensors that step() left in .grad, by parameter, and their versions.
        self._grads_after_step: list[tuple[Tensor, weakref.ref[Tensor], int]] = []
        # Parameters whose gradients a forward has cleared.
        self._cleared: list[Tensor] = []

    # In backward.

    def begin_pass(self) -> None:
        self.forget()
        self._cleared, self.unused = [], set()

    def forget(self) -> None:
        """Reset: ``.grad`` no longer holds gradients of a backward that was reduced."""
        self.reduced, self.applied, self.released = {}, {}, set()
        self._handed, self._grads_after_step = _HandedOver(), []

    def note_applied(self, parameters: Collection[Tensor]) -> None:
        """The gradients of these parameters, all of them this update's, have been applied."""
        self.applied.update(zip(map(id, parameters), parameters, strict=True))

    # Between backward and step().

    def wrap_grads(self) -> None:
        """Give the loop the gradients that were applied, to be read; or where this rank has only a part of each,
        stand-ins for all that were reduced, which cannot be read. Nor can a released gradient.

        Inside of a wrapper is not DDP's view of a bucket but another one of the same memory: DDP's share one version
        counter, so that an edit of one, after ``step()``, would count for all. DDP takes either.
        """
        parameters = list((self.reduced if self.has_parts else self.applied).values())
        gradients = list(map(_grad_of, parameters))
        handed = self._kept
        if (
            handed is None
            or handed.are_parts != self.has_parts
            or not (_are_same(handed.parameters, parameters) and _are_same(handed.gradients, gradients))
        ):
            handed = self._wrapped(parameters, gradients)
            # DDP makes its buckets anew after the first pass: wrappers kept of the old ones would hold their memory.
            is_kept = not (self._is_first_pass or type(None) in map(type, handed.gradients))
            self._kept = handed if is_kept and all(map(_is_view, handed.gradients)) else None
            self._is_first_pass = False
        _run_all(map(set_grad, handed.parameters, handed.wrappers))
        self._handed = handed

    def _wrapped(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> _HandedOver:
        handed, inners, likes = _HandedOver(are_parts=self.has_parts), list[Tensor | None](), list[Tensor]()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is None and id(parameter) not in self.released:
                continue
            inner = gradient
            if type(gradient) is GuardedGradient:  # Of the pass before, if no forward was seen that would clear it.
                inner = gradient.plain
            elif gradient is not None and gradient._is_view():
                inner = gradient.data
            inners.append(inner)
            likes.append(parameter if inner is None else inner)
            handed.parameters.append(parameter)
            handed.gradients.append(gradient)
        references = map(weakref.ref, handed.parameters)
        handed.wrappers.extend(around(inners, likes, references, self._policy, is_readable=not self.has_parts))
        return handed

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Within it ``.grad`` are ordinary tensors; parts of this rank are handed over again afterwards."""
        handed = self._handed if self.has_parts else _HandedOver()
        pairs = zip(handed.parameters, handed.wrappers, strict=True)
        opened = [(p, wrapper) for p, wrapper in pairs if p.grad is wrapper and wrapper.plain is not None]
        for parameter, wrapper in opened:
            parameter.grad = wrapper.plain
        try:
            yield
        finally:
            replaced = [p for p, wrapper in opened if p.grad is not wrapper.plain]
            for parameter, wrapper in opened:
                if parameter.grad is wrapper.plain:
                    parameter.grad = wrapper
            if replaced:  # By a gradient in other strides.
                self.wrap_grads()

    def take_replaced(self) -> list[Tensor]:
        """Parameters in whose ``.grad`` the loop has put something else than was handed over, each once; that counts as
        applied from now on, so that the next forward clears it."""
        handed = self._handed
        is_there = handed.are_there()
        if all(is_there):
            return []
        still = zip(handed.parameters, handed.wrappers, strict=True)
        self._handed = _HandedOver()
        for parameter, wrapper in compress(still, is_there):
            self._handed.parameters.append(parameter)
            self._handed.wrappers.append(wrapper)
        replaced = list(compress(handed.parameters, map(operator.not_, is_there)))
        self._note_grads_after_step(replaced, list(map(_grad_of, replaced)))
        return replaced

    def follow(self, gradient: GuardedGradient, moved: Tensor) -> None:
        """The parameter of ``gradient`` was moved, and ``moved`` takes the gradient's place."""
        parameter = gradient.parameter()
        assert parameter is not None, "it has this gradient"
        made: Any = moved
        if not isinstance(moved, GuardedGradient):
            made = GuardedGradient(moved, moved, gradient.parameter, self._policy, is_readable=gradient.is_readable)
        parameter.grad = made
        handed = self._handed
        wrappers = [made if wrapper is gradient else wrapper for wrapper in handed.wrappers]
        self._handed, self._kept = _HandedOver(handed.parameters, [], wrappers), None

    # From step() to the next forward.

    def unwrap_grads(self) -> None:
        """Put ordinary tensors back into ``.grad``, except where this rank has only a part of the gradient, or none;
        and note those that were applied as they are now, for the next forward to clear."""
        self._grads_after_step = []
        taken, gradients = ([], []) if self.has_parts else self._take(keeps_empty=True)
        self._note_grads_after_step(taken, gradients)
        if len(taken) < len(self.applied):
            others = list(map(self.applied.__getitem__, self.applied.keys() - map(id, taken)))
            for parameter in others:
                if (gradient := parameter.grad) is not None and gradient._is_view():
                    parameter.grad = gradient.data  # See wrap_grads.
            self._note_grads_after_step(others, list(map(_grad_of, others)))

    def _take(self, *, keeps_empty: bool = False) -> tuple[list[Tensor], list[Tensor | None]]:
        """Put the tensors inside back into ``.grad`` where the gradients that were handed over are still there; with
        ``keeps_empty`` not where there is none inside. Returns the parameters, and those tensors."""
        handed, self._handed = self._handed, _HandedOver()
        is_there = handed.are_there()
        if keeps_empty and self.released:
            for place, (parameter, wrapper) in enumerate(zip(handed.parameters, handed.wrappers, strict=True)):
                if is_there[place] and wrapper.plain is None:
                    is_there[place] = False
                    self._handed.parameters.append(parameter)
                    self._handed.wrappers.append(wrapper)
        taken = list(compress(handed.parameters, is_there))
        gradients = list(map(_plain_of, compress(handed.wrappers, is_there)))
        _run_all(map(set_grad, taken, gradients))
        return taken, gradients

    def _note_grads_after_step(self, parameters: list[Tensor], gradients: list[Any]) -> None:
        if not _NOT_LEFT.isdisjoint(map(type, gradients)):
            is_left = [type(gradient) not in _NOT_LEFT for gradient in gradients]
            parameters, gradients = list(compress(parameters, is_left)), list(compress(gradients, is_left))
        self._grads_after_step += zip(parameters, map(weakref.ref, gradients), versions(gradients), strict=True)

    def as_after_step(self) -> list[Tensor]:
        """Parameters whose gradients are still the tensors that :meth:`unwrap_grads` noted, at the same versions."""
        return [
            p
            for p, noted, version in self._grads_after_step
            if (g := p.grad) is not None and g is noted() and g._version == version
        ]

    def has_applied(self) -> bool:
        """Whether a gradient that was applied is still in ``.grad``, or was released."""
        return bool(self.released) or any(parameter.grad is not None for parameter in self.applied.values())

    def has_added_to_applied(self) -> bool:
        """Whether a backward may have added to applied gradients: ``.grad`` is still the tensor that was left."""
        return any(p.grad is not None and p.grad is noted() for p, noted, _ in self._grads_after_step)

    def has_changed_applied(self) -> bool:
        """Whether the loop has changed a gradient since it was applied, or has put another in its place."""
        left = set(map(id, self.as_after_step()))
        there = (p for p in self.applied.values() if p.grad is not None and id(p) not in left)
        return any(type(p.grad) is not GuardedGradient for p in there)

    def clear_applied(self, *, is_replay: bool) -> None:
        """Clear the gradients that were applied and are as they were left; all of them after a replay, since ``Join``
        has put them there, and not the loop. A gradient that the loop has put there or zeroed stays."""
        cleared = self._take()[0] + (list(self.applied.values()) if is_replay else self.as_after_step())
        _run_all(map(set_grad, cleared, repeat(None)))
        self._cleared += cleared
        self._grads_after_step = []
        for key in self.applied:
            self.reduced.pop(key, None)
        self.applied = {}

    @torch.no_grad()
    def note_zero_grad(self, *, set_to_none: bool, restores: bool) -> None:
        """``zero_grad()`` is going to clear or zero all gradients; zeros belong where a forward has cleared some, too,
        if it ``restores`` them."""
        taken = self._take()[0]
        for parameter in () if set_to_none else taken + (self._cleared if restores else []):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._cleared = []

    def clear_all(self, names: Iterable[Tensor]) -> None:
        """Clear every gradient of the model, after a failure."""
        for parameter in {**self.reduced, **{id(p): p for p in names}}.values():
            if self.owns(parameter):
                parameter.grad = None
        self.forget()
        self._cleared = []

    def clear_for_good(self) -> None:
        """Clear gradients that were applied, so that no optimizer that is left alone applies them again."""
        for parameter in [p for p in self.applied.values() if type(p.grad) is GuardedGradient]:
            parameter.grad = None
        for parameter in [p for p, noted, _ in self._grads_after_step if p.grad is noted()]:
            parameter.grad = None
        self._kept = None
        self.forget()
        self._cleared = []


def _are_same(one: Sequence[object], other: Sequence[object]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


class StepInputs:
    """The hyperparameters that an update in backward used, and the parameters that it wrote, to compare in ``step()``.

    In plain DDP the update comes with ``step()``, so it sees a learning rate, a group or a parameter that the loop
    changes after backward. Parameters are compared by version; a change through ``.data`` raises none. State that is
    edited by hand between the two is not looked at.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], parameters: Sequence[Tensor]) -> None:
        self._groups = list(map(_values, groups))
        self._parameters = parameters
        self._versions = versions(parameters)

    def changed(self, groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str]) -> str | None:
        """The first of them that has changed since, in words. Parameters and keys may have been added."""
        for place, before in enumerate(self._groups):
            now = _values(groups[place] if place < len(groups) else {"params": ()})
            for key in before if now != before else ():
                if key == "params":
                    if not set(before[key]) <= set(now[key]):
                        return f"the list of parameters of parameter group {place} was changed"
                elif key not in now or now[key] != before[key]:
                    return f"{key!r} of parameter group {place} was changed from {before[key]!r} to {now.get(key)!r}"
        now_versions = versions(self._parameters)
        if now_versions == self._versions:
            return None
        differs = map(operator.ne, self._versions, now_versions)
        changed = [names.get(parameter, "a parameter") for parameter in compress(self._parameters, differs)]
        return f"{changed[0]}{and_others(changed, 'other parameter')} was changed"


def _values(group: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a group, so that equal dictionaries mean equal hyperparameters and the same parameters."""
    values: dict[str, Any] = {"params": list(map(id, group["params"]))}
    for key, value in group.items():
        if key != "params":
            is_plain = type(value) in _PLAIN or (type(value) is tuple and _PLAIN.issuperset(map(type, value)))
            values[key] = value if is_plain else _content(value)
    return values


def _content(value: Any) -> Any:
    if isinstance(value, Tensor):
        # The host would wait for a value on another device.
        is_read = value.numel() == 1 and value.device.type == "cpu"
        return value.item() if is_read else ("another tensor", id(value), value._version)
    if isinstance(value, (list, tuple)):
        return list(map(_content, value))
    if isinstance(value, dict):
        return {key: _content(each) for key, each in value.items()}
    return value if type(value) in _PLAIN else id(value)


def and_others(names: Sequence[Any], noun: str = "other") -> str:
    """How many more than the first there are, in brackets; empty for one.

    >>> and_others(["a"]), and_others(["a", "b"]), and_others(["a", "b", "c"], "other parameter")
    ('', ' (and 1 other)', ' (and 2 other parameters)')
    """
    count = len(names) - 1
    return f" (and {count} {noun}{'s' if count > 1 else ''})" if count else ""
