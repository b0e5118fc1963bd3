"""The lifecycle of an update: what a training loop may do when, and what happens to the gradients.

[Note: the update lifecycle]

An update that is not made in ``optimizer.step()`` must be exactly plain DDP's, or an error. Which one depends on
whether gradients are there, are the mean over ranks, have been applied: that is one :class:`Phase`, and
:data:`TRANSITIONS` lists the phase that follows each event, and the events that are refused. A comment in the table
marks the entries that depend on the gradients, too; :class:`UpdateLifecycle` refuses those. ``Step``, ``ZeroStep`` and
local SGD use it alike. ``docs/guides/loop.md`` shows the table as a picture.

What happens to ``.grad`` (local SGD without an update in backward is an ordinary optimizer, and only clears gradients
of a failure):

- A gradient that the library did not make is never cleared or overwritten.
- One that has been applied is never applied again. It stays readable until the model's next forward clears it.
- An edit of one that was applied in backward would be lost, so such gradients are handed over read-only, until
  ``step()``, or where the loop calls none, until the next forward. See [Note: applied gradients are read-only].
- One of which this rank has only a part, or whose memory was released, cannot be read, either.

The file is long because a phase and its gradients are one thing: what an event means depends on both.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap._torch.autograd import versions
from overlap._torch.ddp import backward_may_synchronize
from overlap._torch.read_only import AppliedGradient, Attempt, Terms
from overlap.errors import TrainingLoopError, hide_internal_frames
from overlap.optim.phases import (
    ADDED_TO_APPLIED,
    APPLIED_TWICE,
    CANNOT_DISCARD_UNDER_JOIN,
    REFUSED_ATTEMPTS,
    SECOND_BACKWARD,
    TRANSITIONS,
    UNREDUCED,
    Event,
    Form,
    Phase,
    Refusal,
)
from overlap.optim.stepper import Verdict

__all__ = ["PassGradients", "UpdateLifecycle", "refusals_told"]

_NO_VERDICT = Verdict()
_OF_PARTS = (Attempt.READ, Attempt.WRITE, Attempt.SEND)
_PLAIN = frozenset({bool, int, float, complex, str, type(None)})


@dataclass(frozen=True)
class refusals_told:  # noqa: N801 (used as a function)
    """Report a refusal inside the block to the other ranks, which would wait for this one."""

    lifecycles: Iterable[UpdateLifecycle]

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, TrainingLoopError):
            for lifecycle in self.lifecycles:
                lifecycle.tell(error)
            hide_internal_frames(error)


class UpdateLifecycle:
    """The phase of one model's update, and which of its gradients are the library's. See [Note: the update lifecycle].

    Args:
        form: how the update is made.
        clears: whether the gradient of a parameter is this update's to clear.
        groups: the parameter groups whose hyperparameters an update in backward uses.
    """

    def __init__(
        self,
        form: Form,
        *,
        clears: Callable[[Tensor], bool],
        groups: Callable[[], Sequence[Mapping[str, Any]]] | None = None,
    ) -> None:
        self.form = form
        self.phase = Phase.IDLE
        self.outcome = form.outcome
        """The phase after the last backward, or the one under way: the form's own, unless its update was skipped."""
        self.names: Mapping[Tensor, str] = {}
        """The model's parameters, where they are known."""
        self.ddp: Callable[[], DistributedDataParallel | None] = lambda: None
        """The model, where it is known and alive."""
        self.sees_forwards = False
        """Whether :meth:`on_forward` is called; not for a hook that is registered with DDP itself."""
        self.is_joining: Callable[[], bool] = lambda: False
        """Whether ranks that have run out of inputs make the updates of others as they are reduced."""
        self.tell: Callable[[BaseException], None] = lambda error: None
        """Reports a refusal to the other ranks, which would wait for this one."""
        self.note_unfinished: Callable[[], None] = lambda: None
        """Before the next forward, discards DDP's unfinished backward."""
        self.verdict = _NO_VERDICT
        """A stage's, of the last backward: whether the update is to change nothing."""
        self.has_parts = False
        """Whether ``.grad`` is the mean only where this rank owns it, after the last backward."""
        self.is_replay = False
        """Whether the last backward was a replay, so that no ``.grad`` came of it on this rank."""
        self.gradients = PassGradients(clears, error=self._error_for, on_zero=self._on_zero)
        self._groups = groups
        self._used: UsedValues | None = None
        self._has_forward = False  # Since the last step().

    # Events.

    def on_forward(self) -> None:
        """A forward that records gradients begins; clears applied gradients.

        Raises:
            TrainingLoopError: ``step()`` is due, and the loop has put something else into ``.grad``.
        """
        self._clear_before_pass()
        self._has_forward = True
        if self.phase is Phase.REDUCED and all(p.grad is None for p in self.gradients.reduced.values()):
            self.on_zero_grad()  # The loop has cleared them by itself.
        self._move(Event.FORWARD)
        if self.phase is Phase.IDLE:
            self.gradients.forget()
        else:
            reduced = self.gradients.reduced
            for key in [key for key, parameter in reduced.items() if parameter.grad is None]:
                del reduced[key]

    def on_backward(self, *, is_replay: bool, outcome: Phase | None = None) -> None:
        """The first bucket has arrived, of a backward that leads to ``outcome``; to the form's own where ``None``.

        Raises:
            TrainingLoopError: ``step()`` is still due for the backward before.
        """
        if self.phase is Phase.FAILED and not self.sees_forwards:
            self.phase = Phase.IDLE
        if is_replay:
            self._begin_replay()
        elif self.phase is Phase.REDUCED and not self.form.adds_up:
            self._refuse(SECOND_BACKWARD)
        elif self.phase is Phase.REDUCED and self.is_joining():
            self._refuse(replace(CANNOT_DISCARD_UNDER_JOIN, then=Phase.FAILED))
        elif self.phase is Phase.STEPPED and self.sees_forwards and self.gradients.has_added_to_applied():
            self._refuse(ADDED_TO_APPLIED)
        else:
            self._move(Event.BACKWARD)
        self.outcome = outcome or self.form.outcome
        self.is_replay = is_replay
        self._used = None
        self.verdict = _NO_VERDICT
        self.gradients.begin_pass()

    def _begin_replay(self) -> None:
        self._clear_before_pass()
        if self.phase is Phase.REDUCED and self.is_replay:
            self.phase = Phase.IDLE  # The others have discarded that backward.
        self._move(Event.REPLAY)

    def _clear_before_pass(self) -> None:
        if self.phase is Phase.FAILED:
            self.gradients.clear_all(self.names)
        elif self.phase in (Phase.APPLIED, Phase.STEPPED):
            self._refuse_replaced()
            self.gradients.clear_applied()

    def on_reduced(self, outcome: Phase | None = None) -> None:
        """All buckets are through and DDP has set ``.grad``; ``outcome`` is the pass's own where ``None``."""
        self.phase = outcome or self.outcome
        if self.is_replay:
            self.gradients.is_replayed = True
            return
        if self.has_parts or self.phase is not Phase.REDUCED:
            self.gradients.hand_over(parts=self.has_parts, allows_unscaling=self.phase is Phase.REDUCED)
        if self.phase is Phase.APPLIED and self._groups is not None:
            self._used = UsedValues(self._groups(), list(self.gradients.applied.values()))

    def on_step(self, updated: Iterable[Tensor] = ()) -> None:
        """``step()`` has made its update, of ``updated`` among others; :meth:`check_step` came first."""
        if self.phase in (Phase.REDUCED, Phase.APPLIED):
            reduced = self.gradients.reduced
            self.gradients.note_applied([p for p in updated if id(p) in reduced] if updated else ())
            self.gradients.take_back()
            self.gradients.allows_unscaling = False
        self._used = None
        self._has_forward = False
        self.verdict = _NO_VERDICT
        self._move(Event.STEP)

    def on_zero_grad(self, *, set_to_none: bool = True) -> None:
        """``zero_grad()`` is called, and clears what is there.

        Raises:
            TrainingLoopError: the update was made in backward, and ``step()`` is due.
        """
        self.check(Event.ZERO_GRAD)
        self.verdict = _NO_VERDICT
        is_before_backward = self.phase in (Phase.IDLE, Phase.STEPPED)
        self.gradients.note_zero_grad(set_to_none=set_to_none, restores=is_before_backward)
        self._move(Event.ZERO_GRAD)
        if self.phase is Phase.IDLE:
            self.gradients.forget()

    def on_load(self) -> None:
        """``load_state_dict()`` is called; may raise as :meth:`on_zero_grad`."""
        self._move(Event.LOAD)

    def on_failure(self) -> None:
        """A stage raised in backward."""
        self._used = None
        self._move(Event.FAILURE)

    def on_update_failure(self) -> None:
        """The optimizer raised in ``step()``."""
        self._move(Event.UPDATE_FAILURE)

    def on_remove(self) -> None:
        """The registration is removed: an optimizer that is left alone must not apply gradients again."""
        if self.phase is Phase.FAILED:
            self.gradients.clear_all(self.names)
        self.gradients.clear_for_good()
        self._used = None
        self.tell = lambda error: None
        self._move(Event.REMOVE)

    # Checks of step() before it updates.

    def check(self, event: Event) -> None:
        """Raises: TrainingLoopError: ``event`` is refused in this phase."""
        outcome = TRANSITIONS[event][self.phase]
        if isinstance(outcome, Refusal):
            self._refuse(outcome)
        if event is Event.ZERO_GRAD and self.phase is Phase.REDUCED and self.is_joining():
            self._refuse(CANNOT_DISCARD_UNDER_JOIN)

    def check_step(self) -> None:
        """Raises: TrainingLoopError: ``step()`` cannot be called now, or the loop has changed a gradient, parameter or
        hyperparameter that the update used."""
        self.check(Event.STEP)
        self._refuse_replaced()
        used, self._used = self._used, None  # Report each change only once.
        if used is not None and self._groups is not None and self.phase is Phase.APPLIED:
            used.refuse_changes(self._groups(), self.names, self.form)

    def check_reduced(self, pending: Iterable[Tensor], *, allows_zeros: bool = True) -> None:
        """Raises: TrainingLoopError: a gradient that ``step()`` would apply is this rank's own, not the mean; zeros,
        with which an optimizer makes its state, are the same on every rank."""
        reduced = self.gradients.reduced
        local = [p for p in pending if id(p) not in reduced and p in self.names]
        if local and allows_zeros:
            local = _nonzero(local)
        if not local:
            return
        if reduced:
            cause = "the backward did not reach them, or they were frozen when DistributedDataParallel was made"
        elif self.sees_forwards and not self._has_forward:
            cause = "they came of no forward of the DistributedDataParallel: call ddp(x), not model(x) or ddp.module(x)"
        elif (ddp := self.ddp()) is not None and backward_may_synchronize(ddp):
            cause = (
                "no backward that reaches all parameters, as one with inputs=... does not, has followed the forward of "
                "the DistributedDataParallel"
            )
        else:
            cause = "they came under ddp.no_sync(): run the last forward and backward of a step outside of it"
        names = self.names[local[0]] + and_others(local)
        raise TrainingLoopError(UNREDUCED.format(step=self.form.step, names=names, cause=cause))

    def check_once(self, *, is_all: bool = True) -> None:
        """Raises: TrainingLoopError: only applied gradients are there (``is_all``: nothing else is to be applied), or
        the loop has changed one since, so that plain DDP would apply it again."""
        if self.phase is not Phase.STEPPED:
            return
        is_over = is_all and self.form.outcome is not Phase.STEPPED
        if (is_over and self.gradients.has_left()) or self.gradients.has_changed_applied():
            self._refuse(APPLIED_TWICE)

    def _refuse_replaced(self) -> None:
        """Raises: TrainingLoopError: between an update in backward and ``step()`` the loop has put something else into
        ``.grad``, or ``None``; once."""
        if self.phase is Phase.APPLIED and (replaced := self.gradients.take_replaced()):
            raise self._error_for(replaced[0], Attempt.WRITE, others=and_others(replaced))

    def _error_for(self, parameter: Tensor | None, attempt: Attempt, others: str = "") -> TrainingLoopError:
        """The error for an attempt to use a gradient that was handed over."""
        form = self.form
        name = "a parameter" if parameter is None else self.names.get(parameter, "a parameter")
        if id(parameter) in self.gradients.released and attempt not in (Attempt.ACCUMULATE, Attempt.UNSCALE):
            text = REFUSED_ATTEMPTS["released"]
        elif self.has_parts and self.phase in (Phase.REDUCED, Phase.FAILED) and attempt is Attempt.ACCUMULATE:
            text = REFUSED_ATTEMPTS["accumulate part"]
            # Raised before DDP has seen a gradient of this backward, which it would wait for in the next forward.
            self.note_unfinished()
        elif attempt is Attempt.ACCUMULATE and self.phase is Phase.STEPPED and form.outcome is not Phase.STEPPED:
            text = REFUSED_ATTEMPTS["accumulate applied"]
        elif self.has_parts and attempt in _OF_PARTS:
            text = REFUSED_ATTEMPTS["part"]
        else:
            text = REFUSED_ATTEMPTS[attempt.value]
        step = "the next forward" if form.outcome is Phase.STEPPED else form.step
        return TrainingLoopError(
            text.format(name=name + others, step=step, deferred=form.deferred_code, edits=form.edits, clip=form.clip)
        )

    def _on_zero(self) -> None:
        if self.phase is Phase.APPLIED:
            self.check(Event.ZERO_GRAD)

    # The table.

    def _move(self, event: Event) -> None:
        outcome = TRANSITIONS[event][self.phase]
        if isinstance(outcome, Refusal):
            self._refuse(outcome)
        else:
            self.phase = outcome

    def _refuse(self, refusal: Refusal) -> None:
        reduced, owns, form = self.gradients.reduced, self.gradients.owns, self.form
        missing = [name for parameter, name in self.names.items() if id(parameter) not in reduced and owns(parameter)]
        listed = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        adds_up = f"use {form.edits}, whose backwards add up as in plain DDP; or " if form.adds_up else ""
        self.phase = refusal.then or self.phase
        words = {"step": form.step, "deferred": form.deferred_code, "skip": form.skip}
        raise TrainingLoopError(refusal.message.format(missing=listed, adds_up=adds_up, **words))


def _nonzero(parameters: list[Tensor]) -> list[Tensor]:
    """Those whose gradient has a value that is not zero; the host waits for all of them at once."""
    present = [parameter for parameter in parameters if parameter.grad is not None]
    flags = torch.stack([p.grad.any() for p in present if p.grad is not None]).tolist() if present else []
    return [parameter for parameter, is_nonzero in zip(present, flags, strict=True) if is_nonzero]


class PassGradients(Terms):
    """Of which of an update's parameters the last backward reduced the gradients, and which have been applied.

    These are the terms of gradients that are handed over. The next forward clears a gradient that is still the tensor
    that ``step()`` left, at the same version; what the loop has put there or zeroed stays.

    Args:
        owns: whether the gradient of a parameter is this update's to clear.
        error: makes the error for an attempt to use a gradient that is not the loop's.
        on_zero: called before ``zero_grad(set_to_none=False)`` of the model zeroes gradients; may raise.
    """

    def __init__(
        self,
        owns: Callable[[Tensor], bool],
        *,
        error: Callable[[Tensor | None, Attempt], TrainingLoopError] = lambda parameter, attempt: TrainingLoopError(),
        on_zero: Callable[[], None] = lambda: None,
    ) -> None:
        self.owns = owns
        self._error = error
        self._on_zero = on_zero
        self.reduced: dict[int, Tensor] = {}
        """By ``id``, the parameters whose gradients came in a bucket of the last backward."""
        self.applied: dict[int, Tensor] = {}
        """By ``id``, those whose gradients have been applied."""
        self.unused: set[int] = set()
        """By ``id``, those that no rank has used in the last backward, as far as was asked: DDP leaves their
        ``.grad``."""
        self.released: set[int] = set()
        """By ``id``, those whose gradients were applied, and their memory released."""
        self.is_replayed = False
        """Whether the pass was a replay, after which ``Join`` puts the mean into ``.grad``: nothing there is the
        loop's."""
        self._has_parts = False
        self._handed: list[tuple[Tensor, weakref.ref[AppliedGradient]]] = []
        # By id of the parameter, those that are not handed over: to make one takes longer.
        self._spare: dict[int, AppliedGradient] = {}
        # What step() left in .grad: parameters, gradients and their versions; and the views of DDP's buckets that some
        # of those gradients stand for.
        self._left: list[tuple[Tensor, weakref.ref[Tensor], int]] = []
        self._views: list[tuple[Tensor, weakref.ref[Tensor], Tensor]] = []
        # Parameters whose gradients a forward has cleared.
        self._cleared: list[Tensor] = []

    # In backward.

    def begin_pass(self) -> None:
        """A backward begins."""
        self.forget()
        self._cleared, self.unused = [], set()

    def forget(self) -> None:
        """Reset: ``.grad`` no longer holds gradients of a backward that was reduced."""
        self.reduced, self.applied, self.released = {}, {}, set()
        self._handed, self._left, self._views, self.is_replayed = [], [], [], False

    def note_reduced(self, owned: Mapping[int, Tensor]) -> None:
        """A bucket has been reduced that holds the gradients of ``owned``, this update's parameters by ``id``."""
        self.reduced.update(owned)

    def note_applied(self, parameters: Collection[Tensor]) -> None:
        """The gradients of these parameters, all of them this update's, have been applied."""
        self.applied.update(zip(map(id, parameters), parameters, strict=True))

    # Between backward and step().

    def hand_over(self, *, parts: bool = False, allows_unscaling: bool = False) -> None:
        """Give the loop the gradients that were applied, to be read; or with ``parts``, where this rank has only a part
        of each, stand-ins for all that were reduced, which cannot be read. Nor can a released gradient.
        ``GradScaler`` may unscale them where the update ``allows_unscaling``."""
        self._has_parts, self.allows_unscaling = parts, allows_unscaling
        spare, handed = self._spare, self._handed
        for key, parameter in (self.reduced if parts else self.applied).items():
            gradient = parameter.grad
            if key in self.released:
                gradient = None
            elif gradient is None or gradient.is_sparse:
                continue
            elif type(gradient) is AppliedGradient:  # Of the pass before, if no forward was seen that would clear it.
                gradient = gradient.plain
            wrapper, like = spare.pop(key, None), parameter if gradient is None else gradient
            if wrapper is None or wrapper.stride() != like.stride():
                wrapper = AppliedGradient(gradient, like, weakref.ref(parameter), self)
            wrapper.plain, wrapper.is_readable = gradient, not parts
            parameter.grad = wrapper
            handed.append((parameter, weakref.ref(wrapper)))

    def _take(self, *, keeps_empty: bool = False) -> list[Tensor]:
        """Put the tensors inside back into ``.grad`` where the gradients that were handed over are still there; with
        ``keeps_empty`` not where there is none inside. Returns the parameters.

        A wrapper is used again, unless the loop has kept it: that one still shows its own gradient.
        """
        taken, kept = [], []
        for parameter, wrapper in self._handed:
            handed = parameter.grad
            if not isinstance(handed, AppliedGradient) or handed is not wrapper():
                continue
            if handed.plain is None and keeps_empty:
                kept.append((parameter, wrapper))
                continue
            parameter.grad = handed.plain
            if sys.getrefcount(handed) == _REFERENCES:
                handed.plain = None
                self._spare[id(parameter)] = handed
            taken.append(parameter)
        self._handed = kept
        return taken

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Within it ``.grad`` are ordinary tensors; what this rank has only in part is handed over again afterwards."""
        parts = self._has_parts
        if parts:
            self._take(keeps_empty=True)
        try:
            yield
        finally:
            if parts:
                self.hand_over(parts=True, allows_unscaling=True)

    def take_replaced(self) -> list[Tensor]:
        """Parameters in whose ``.grad`` the loop has put something else than was handed over, each once; that counts as
        applied from now on, so that the next forward clears it."""
        replaced: list[Tensor] = []
        for parameter, wrapper in self._handed:
            if (gradient := parameter.grad) is None or gradient is not wrapper():
                replaced.append(parameter)
        if replaced:
            ids = set(map(id, replaced))
            self._handed = [(p, wrapper) for p, wrapper in self._handed if id(p) not in ids]
            self._left += [(p, weakref.ref(p.grad), p.grad._version) for p in replaced if p.grad is not None]
        return replaced

    # From step() to the next forward.

    def take_back(self) -> None:
        """Put ordinary tensors back into ``.grad``, except where this rank has only a part of the gradient, or none."""
        if not self._has_parts:
            self._take(keeps_empty=True)
        self.note_left()

    def note_left(self) -> None:
        """Note the gradients that were applied as they are now; the next forward clears them if they still are.

        Views of a bucket of DDP's share one version counter, so that an edit of one would count for all. So until then
        other views take their place, each with a counter of its own.
        """
        self._left = left = []
        for parameter in self.applied.values():
            gradient = parameter.grad
            if gradient is None or type(gradient) is AppliedGradient:
                continue
            if gradient._is_view():
                view, gradient = gradient, gradient.data
                parameter.grad = gradient
                self._views.append((parameter, weakref.ref(gradient), view))
            left.append((parameter, weakref.ref(gradient), gradient._version))

    def as_left(self) -> list[Tensor]:
        """Parameters whose gradients are still what :meth:`note_left` noted."""
        found: list[Tensor] = []
        for parameter, noted, version in self._left:
            gradient = parameter.grad
            if gradient is not None and gradient is noted() and gradient._version == version:
                found.append(parameter)
        return found

    def has_left(self) -> bool:
        """Whether a gradient that was applied is still in ``.grad``, or was released."""
        return bool(self.released) or any(parameter.grad is not None for parameter in self.applied.values())

    def has_added_to_applied(self) -> bool:
        """Whether a backward may have added to applied gradients: ``.grad`` is still the tensor that was left."""
        return any(p.grad is not None and p.grad is noted() for p, noted, _ in self._left)

    def has_changed_applied(self) -> bool:
        """Whether the loop has changed a gradient since it was applied, or has put another in its place."""
        left = set(map(id, self.as_left()))
        there = (p for p in self.applied.values() if p.grad is not None and id(p) not in left)
        return any(type(p.grad) is not AppliedGradient for p in there)

    def clear_applied(self) -> None:
        """Clear the gradients that were applied and are as they were left."""
        handed = self._take() if self._handed else []
        for parameter in handed + (list(self.applied.values()) if self.is_replayed else self.as_left()):
            parameter.grad = None
            self._cleared.append(parameter)
        self._put_views_back()
        self._left = []
        for key in self.applied:
            self.reduced.pop(key, None)
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
        for parameter in (p for p, noted, _ in self._left if p.grad is noted()):
            parameter.grad = None
        self._put_views_back()
        self._spare = {}
        self.forget()
        self._cleared = []

    def _put_views_back(self) -> None:
        views, self._views = self._views, []
        for parameter, alone, view in views:
            if parameter.grad is not None and parameter.grad is alone():
                parameter.grad = view

    # Terms: a gradient that was handed over is used by the loop.

    def refuse(self, gradient: AppliedGradient, attempt: Attempt) -> NoReturn:
        raise self._error(gradient.parameter(), attempt)

    @torch.no_grad()
    def zero(self, gradient: AppliedGradient) -> None:
        self._on_zero()
        parameter = gradient.parameter()
        if parameter is None or parameter.grad is not gradient:
            self.refuse(gradient, Attempt.WRITE)
        parameter.grad = torch.zeros_like(parameter) if gradient.plain is None else gradient.plain.zero_()


def _references_of_a_local() -> int:
    """``sys.getrefcount`` of an object that one local variable refers to."""
    alone = object()
    return sys.getrefcount(alone)


_REFERENCES = _references_of_a_local()


class UsedValues:
    """The hyperparameters that an update in backward used, and the parameters that it wrote, to compare in ``step()``.

    In plain DDP the update comes with ``step()``, so it sees a learning rate, a group or a parameter that the loop
    changes after backward. Parameters are compared by version; a change through ``.data`` raises none. State that is
    edited by hand between the two is not looked at.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], parameters: Sequence[Tensor]) -> None:
        self._groups = list(map(_values, groups))
        self._parameters = parameters
        self._versions = versions(parameters)

    def refuse_changes(self, groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str], form: Form) -> None:
        """Raises: TrainingLoopError: one of them has changed since. Parameters and keys may have been added."""
        deferred = form.deferred_code
        between = f"between backward and {form.step}, but the update had been made in backward"
        for place, before in enumerate(self._groups):
            now = _values(groups[place] if place < len(groups) else {"params": ()})
            if now == before:
                continue
            if not set(before["params"]) <= set(now["params"]):
                raise TrainingLoopError(
                    f"parameters were taken out of parameter group {place} {between}: use {deferred}, or take "
                    f"them out before the backward or after {form.step}"
                )
            for key in before:
                if key != "params" and (key not in now or now[key] != before[key]):
                    raise TrainingLoopError(
                        f"{key!r} of parameter group {place} was changed from {_shown(before[key])} to "
                        f"{_shown(now.get(key))} {between} with {_shown(before[key])}: use {deferred}, or change "
                        f"it before the backward or after {form.step}"
                    )
        now_versions = versions(self._parameters)
        if now_versions != self._versions:
            differs = map(operator.ne, self._versions, now_versions)
            changed = [names.get(parameter, "a parameter") for parameter in compress(self._parameters, differs)]
            raise TrainingLoopError(
                f"{changed[0]}{and_others(changed, 'other parameter')} was changed {between} already, and plain DDP "
                f"makes it after the change: use {deferred}, or change parameters after {form.step}"
            )


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


def _shown(value: Any) -> str:
    return value[0] if isinstance(value, tuple) and value[:1] == ("another tensor",) else repr(value)


def and_others(names: Sequence[Any], noun: str = "other") -> str:
    """How many more than the first there are, in brackets; empty for one.

    >>> and_others(["a"]), and_others(["a", "b"]), and_others(["a", "b", "c"], "other parameter")
    ('', ' (and 1 other)', ' (and 2 other parameters)')
    """
    count = len(names) - 1
    return f" (and {count} {noun}{'s' if count > 1 else ''})" if count else ""
