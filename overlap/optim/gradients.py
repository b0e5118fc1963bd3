"""The gradients of one update: which were reduced, which were applied, and what the loop may do with them.

[Note: gradients of an update]

- A gradient that the library did not make is never cleared or overwritten.
- One that has been applied is never applied again. It stays readable until the model's next forward clears it.
- An edit of one that was applied in backward would be lost, so such gradients are handed over read-only, until
  ``step()``, or where the loop calls none, until the next forward. See [Note: applied gradients are read-only].
- One of which this rank has only a part, or whose memory was released, cannot be read, either.

Local SGD without an update in backward is an ordinary optimizer, and only clears gradients of a failure.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from overlap._torch.autograd import versions
from overlap._torch.read_only import AppliedGradient, Terms

_NOT_KEPT: tuple[Any, Any] = (None, None)
_PLAIN = frozenset({bool, int, float, complex, str, type(None)})


class PassGradients:
    """Of which of an update's parameters the last backward reduced the gradients, and which have been applied.

    The next forward clears a gradient that is still the tensor that ``step()`` left, at the same version; what the loop
    has put there or zeroed stays.

    Args:
        owns: whether the gradient of a parameter is this update's to clear.
        terms: of the gradients that are handed over.
    """

    def __init__(self, owns: Callable[[Tensor], bool], terms: Terms) -> None:
        self.owns = owns
        self._terms = terms
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
        self._handed: list[tuple[Tensor, AppliedGradient]] = []
        # By id of the parameter, those of gradients that come again in every pass, with what step() leaves for each.
        self._kept: dict[int, tuple[AppliedGradient, Tensor]] = {}
        self._passes = 0
        # By id of the parameter, others that are not handed over.
        self._spare: dict[int, AppliedGradient] = {}
        # What step() left in .grad: parameters, gradients, their versions, and the views that some of them stand for.
        self._left: list[tuple[Tensor, weakref.ref[Tensor], int, Tensor | None]] = []
        # Parameters whose gradients a forward has cleared.
        self._cleared: list[Tensor] = []

    # In backward.

    def begin_pass(self) -> None:
        """A backward begins."""
        self.forget()
        self._cleared, self.unused = [], set()
        self._passes += 1

    def forget(self) -> None:
        """Reset: ``.grad`` no longer holds gradients of a backward that was reduced."""
        self.reduced, self.applied, self.released = {}, {}, set()
        self._handed, self._left = [], []

    def note_applied(self, parameters: Collection[Tensor]) -> None:
        """The gradients of these parameters, all of them this update's, have been applied."""
        self.applied.update(zip(map(id, parameters), parameters, strict=True))

    # Between backward and step().

    def wrap_grads(self) -> None:
        """Give the loop the gradients that were applied, to be read; or where this rank has only a part of each,
        stand-ins for all that were reduced, which cannot be read. Nor can a released gradient.

        A view of a bucket of DDP's is the same object in every pass, and so is what is handed over for it; the loop
        sees the new values in what it has kept, as with plain DDP. DDP makes its buckets anew after the first pass:
        what was kept for a view of that would hold the memory of the old ones.
        """
        parts, kept, spare = self.has_parts, self._kept, self._spare
        for key, parameter in (self.reduced if parts else self.applied).items():
            gradient = parameter.grad
            wrapper, _ = kept.get(key, _NOT_KEPT)
            if key in self.released:
                gradient = None
            elif gradient is None or ((wrapper is None or wrapper.plain is not gradient) and gradient.is_sparse):
                continue
            elif type(gradient) is AppliedGradient:  # Of the pass before, if no forward was seen that would clear it.
                gradient = gradient.plain
            if wrapper is None or wrapper.plain is not gradient:
                kept.pop(key, None)
                wrapper, like = spare.pop(key, None), parameter if gradient is None else gradient
                if wrapper is None or wrapper.stride() != like.stride():
                    wrapper = AppliedGradient(gradient, like, weakref.ref(parameter), self._terms)
                wrapper.plain = gradient
                if gradient is not None and self._passes > 1 and gradient._is_view():
                    kept[key] = wrapper, gradient.data
            wrapper.is_readable = not parts
            parameter.grad = wrapper
            self._handed.append((parameter, wrapper))

    def _take(self, *, keeps_empty: bool = False) -> list[Tensor]:
        """Put the tensors inside back into ``.grad`` where the gradients that were handed over are still there; with
        ``keeps_empty`` not where there is none inside. Returns the parameters."""
        taken, kept = [], []
        for parameter, wrapper in self._handed:
            if parameter.grad is not wrapper:
                continue
            if wrapper.plain is None and keeps_empty:
                kept.append((parameter, wrapper))
                continue
            parameter.grad = wrapper.plain
            taken.append(parameter)
            # One that the loop has kept goes on showing its own gradient. To make another takes longer, and nothing but
            # the count tells whether it was kept: CPython's, of a variable as in `_references_of_a_handed_one`.
            if id(parameter) not in self._kept and sys.getrefcount(wrapper) == _REFERENCES:
                wrapper.plain = None
                self._spare[id(parameter)] = wrapper
        self._handed = kept
        return taken

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Within it ``.grad`` are ordinary tensors; what this rank has only in part is handed over again afterwards."""
        if self.has_parts:
            self._take(keeps_empty=True)
        try:
            yield
        finally:
            if self.has_parts:
                self.wrap_grads()

    def take_replaced(self) -> list[Tensor]:
        """Parameters in whose ``.grad`` the loop has put something else than was handed over, each once; that counts as
        applied from now on, so that the next forward clears it."""
        replaced: list[Tensor] = []
        for parameter, wrapper in self._handed:
            if parameter.grad is not wrapper:
                replaced.append(parameter)
        if replaced:
            ids = set(map(id, replaced))
            self._handed = [(p, wrapper) for p, wrapper in self._handed if id(p) not in ids]
            self._left += [(p, weakref.ref(p.grad), p.grad._version, None) for p in replaced if p.grad is not None]
        return replaced

    def follow(self, gradient: AppliedGradient, moved: Tensor) -> None:
        """The parameter of ``gradient`` was moved, and ``moved`` takes the gradient's place."""
        parameter = gradient.parameter()
        assert parameter is not None, "it has this gradient"
        made: Any = moved
        if not isinstance(moved, AppliedGradient):
            made = AppliedGradient(moved, moved, gradient.parameter, self._terms, is_readable=gradient.is_readable)
        parameter.grad = made
        self._handed = [(p, made if p is parameter else wrapper) for p, wrapper in self._handed]
        self._kept.pop(id(parameter), None)
        self._spare.pop(id(parameter), None)

    # From step() to the next forward.

    def unwrap_grads(self) -> None:
        """Put ordinary tensors back into ``.grad``, except where this rank has only a part of the gradient, or none;
        and note those that were applied as they are now, for the next forward to clear.

        Views of a bucket of DDP's share one version counter, so that an edit of one would count for all. So until then
        other views take their place, each with a counter of its own.
        """
        self._left = left = []
        handed, self._handed, done = self._handed, [], set[int]()
        for pair in handed:
            parameter, wrapper = pair
            _, own = self._kept.get(id(parameter), _NOT_KEPT)
            if own is None or self.has_parts or parameter.grad is not wrapper:
                self._handed.append(pair)
                continue
            parameter.grad = own
            left.append((parameter, weakref.ref(own), own._version, wrapper.plain))
            done.add(id(parameter))
        if not self.has_parts:
            self._take(keeps_empty=True)
        for key, parameter in self.applied.items() if len(done) < len(self.applied) else ():
            gradient, view = parameter.grad, None
            if key in done or gradient is None or type(gradient) is AppliedGradient:
                continue
            wrapper, own = self._kept.get(key, _NOT_KEPT)
            if gradient is own:
                view = wrapper.plain
            elif gradient._is_view():
                view, gradient = gradient, gradient.data
                parameter.grad = gradient
            left.append((parameter, weakref.ref(gradient), gradient._version, view))

    def as_left(self) -> list[Tensor]:
        """Parameters whose gradients are still what :meth:`unwrap_grads` noted."""
        found: list[Tensor] = []
        for parameter, noted, version, _ in self._left:
            gradient = parameter.grad
            if gradient is not None and gradient is noted() and gradient._version == version:
                found.append(parameter)
        return found

    def has_left(self) -> bool:
        """Whether a gradient that was applied is still in ``.grad``, or was released."""
        return bool(self.released) or any(parameter.grad is not None for parameter in self.applied.values())

    def has_added_to_applied(self) -> bool:
        """Whether a backward may have added to applied gradients: ``.grad`` is still the tensor that was left."""
        return any(p.grad is not None and p.grad is noted() for p, noted, _, _ in self._left)

    def has_changed_applied(self) -> bool:
        """Whether the loop has changed a gradient since it was applied, or has put another in its place."""
        left = set(map(id, self.as_left()))
        there = (p for p in self.applied.values() if p.grad is not None and id(p) not in left)
        return any(type(p.grad) is not AppliedGradient for p in there)

    def clear_applied(self, *, is_replay: bool) -> None:
        """Clear the gradients that were applied and are as they were left; all of them after a replay, since ``Join``
        has put them there, and not the loop."""
        handed = self._take() if self._handed else []
        found = list(self.applied.values()) if is_replay else self.as_left()
        for parameter in handed + found:
            parameter.grad = None
        self._cleared += handed + found
        if len(found) < len(self._left):
            self._put_views_back()
        self._left = []
        if self.reduced.keys() <= self.applied.keys():
            self.reduced = {}
        else:
            self.reduced = {key: one for key, one in self.reduced.items() if key not in self.applied}
        self.applied = {}

    @torch.no_grad()
    def note_zero_grad(self, *, set_to_none: bool, restores: bool) -> None:
        """``zero_grad()`` is going to clear or zero all gradients; zeros belong where a forward has cleared some, too,
        if it ``restores`` them."""
        taken = self._take()
        self._put_views_back()
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
        for parameter in (p for p in self.applied.values() if type(p.grad) is AppliedGradient):
            parameter.grad = None
        for parameter in (p for p, noted, _, _ in self._left if p.grad is noted()):
            parameter.grad = None
        self._put_views_back()
        self._kept, self._spare = {}, {}
        self.forget()
        self._cleared = []

    def _put_views_back(self) -> None:
        for parameter, noted, _, view in self._left:
            if view is not None and parameter.grad is not None and parameter.grad is noted():
                parameter.grad = view


def _references_of_a_handed_one() -> int:
    """``sys.getrefcount`` in a loop over pairs of what nothing but the pair refers to."""
    return next(sys.getrefcount(wrapper) for _, wrapper in [(None, object())])


_REFERENCES = _references_of_a_handed_one()


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
    values = {}
    for key, value in group.items():
        if type(value) in _PLAIN or (type(value) is tuple and _PLAIN.issuperset(map(type, value))):
            values[key] = value
        else:
            values[key] = list(map(id, value)) if key == "params" else _content(value)
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
