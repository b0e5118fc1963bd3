"""The lifecycle of an update: what a training loop may do when, and what happens to the gradients.

[Note: the update lifecycle]

An update that is not made in ``optimizer.step()`` must be exactly plain DDP's, or an error. Which one depends on the
loop's place: whether gradients are there, are the mean over ranks, have been applied. That is one value, the
:class:`Phase`, and :data:`TRANSITIONS` lists the phase that follows each event, and the events that are refused. A
comment in the table marks the entries that depend on the gradients, too; :class:`UpdateLifecycle` refuses those.
``Step``, ``ZeroStep`` and local SGD use it alike; no other object keeps a flag about it. ``docs/lifecycle.md`` shows
the table as a picture.

What happens to ``.grad`` (local SGD without an update in backward is an ordinary optimizer, and only clears gradients
of a failure):

- A gradient that the library did not make is never cleared or overwritten.
- One that has been applied is never applied again. It stays readable until the model's next forward clears it.
- An edit of one that was applied in backward would be lost, so such gradients are handed over read-only, until
  ``step()``, or where the loop calls none, until the next forward. See [Note: applied gradients are read-only].
- One of which this rank has only a part, or whose memory was released, cannot be read, either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from overlap._torch.ddp import backward_may_synchronize
from overlap._torch.read_only import Attempt
from overlap.errors import TrainingLoopError, hide_internal_frames
from overlap.optim.applied import PassGradients, UsedValues, and_others
from overlap.optim.phases import (
    ADDED_TO_APPLIED,
    APPLIED_TWICE,
    CANNOT_DISCARD_UNDER_JOIN,
    FORWARD_OUTSIDE_NO_SYNC,
    ONE_STEP_A_BACKWARD,
    REFUSED_ATTEMPTS,
    SECOND_BACKWARD,
    STRAY_FORWARD,
    TRANSITIONS,
    UNREDUCED,
    Event,
    Form,
    Phase,
    Refusal,
)
from overlap.optim.scaler import Veto

__all__ = ["UpdateLifecycle", "refusals_told"]

_OF_PARTS = (Attempt.READ, Attempt.WRITE, Attempt.SEND)


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
        """Has DDP forget a backward that it has prepared, before the next forward."""
        self.veto = Veto()
        """Whether the update of the last backward is to change nothing."""
        self.has_parts = False
        """Whether ``.grad`` is the mean only where this rank owns it, after the last backward."""
        self.is_replay = False
        """Whether the last backward was a replay, so that no ``.grad`` came of it on this rank."""
        self.gradients = PassGradients(clears, error=self._error_for, on_zero=self._on_zero)
        self._groups = groups
        self._used: UsedValues | None = None
        self._has_forward = False  # Since the last step().
        # Why DDP synchronized the last backward against ddp.no_sync(), with the remedy.
        self._unwanted_sync: tuple[str, str] | None = None

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
        unwanted, ddp = None, self.ddp()
        if not is_replay and ddp is not None and not ddp.require_backward_grad_sync:
            unwanted = FORWARD_OUTSIDE_NO_SYNC if backward_may_synchronize(ddp) else STRAY_FORWARD
        self._unwanted_sync = unwanted or self._unwanted_sync
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
        self._unwanted_sync = unwanted
        self.outcome = outcome or self.form.outcome
        self.is_replay = is_replay
        self._used = None
        self.veto.found_inf = None
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
        self.veto.found_inf = None
        self._move(Event.STEP)

    def on_zero_grad(self, *, set_to_none: bool = True) -> None:
        """``zero_grad()`` is called, and clears what is there.

        Raises:
            TrainingLoopError: the update was made in backward, and ``step()`` is due.
        """
        self.check(Event.ZERO_GRAD)
        self.veto.found_inf = None
        is_before_backward = self.phase in (Phase.IDLE, Phase.STEPPED)
        self.gradients.note_zero_grad(set_to_none=set_to_none, restores=is_before_backward)
        self._move(Event.ZERO_GRAD)
        if self.phase is Phase.IDLE:
            self.gradients.forget()

    def on_load(self) -> None:
        """``load_state_dict()`` is called. Raises: TrainingLoopError: as :meth:`on_zero_grad`."""
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
            used.refuse_changes(self._groups(), self.names, step=self.form.step, deferred=self.form.deferred)

    def check_reduced(self, pending: Iterable[Tensor], *, allows_zeros: bool = True) -> None:
        """Raises: TrainingLoopError: a gradient that ``step()`` would apply is this rank's own, not the mean; zeros,
        with which an optimizer makes its state, are the same on every rank."""
        reduced = self.gradients.reduced
        local = [p for p in pending if p in self.names and id(p) not in reduced]
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
            text.format(name=name + others, step=step, deferred=form.deferred, edits=form.edits, clip=form.clip)
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
        cause, remedy = self._unwanted_sync or ONE_STEP_A_BACKWARD
        if form.adds_up:
            adds_up = f"use {form.edits}, whose backwards add up as in plain DDP"
            remedy = f"{remedy}; or {adds_up}" if cause else f"{adds_up}; or {remedy}"
        self.phase = refusal.then or self.phase
        words = {"step": form.step, "deferred": form.deferred, "skip": form.skip, "missing": listed, "cause": cause}
        raise TrainingLoopError(refusal.message.format(remedy=remedy.format(step=form.step), **words))


def _nonzero(parameters: list[Tensor]) -> list[Tensor]:
    """Those whose gradient has a value that is not zero; the host waits for all of them at once."""
    present = [parameter for parameter in parameters if parameter.grad is not None]
    flags = torch.stack([p.grad.any() for p in present if p.grad is not None]).tolist() if present else []
    return [parameter for parameter, is_nonzero in zip(present, flags, strict=True) if is_nonzero]
